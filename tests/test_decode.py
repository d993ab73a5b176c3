"""The decoding loop: acceptance by hand, batches, cut-offs, caches, and a draft that has learnt one document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.data.batches import HeldOutDocuments
from dspark.data.generation import Request, generate
from dspark.data.synthetic import tiny_verifier
from dspark.decode import (
    DecodeSettings,
    _Batch,
    _Block,
    accept_greedy,
    accept_sampled,
    decode,
    draw,
    responses,
    sampling_distribution,
)
from dspark.lossless import chi_square
from dspark.replay import replay_document
from tests.builders import random_draft
from tests.trained import AUX, MASK, build_cache, new_draft, template_prompts, train_draft


def settings(**changes) -> DecodeSettings:
    values = {
        "draft_sampling": "greedy",
        "num_proposals": 4,
        "confidence_threshold": None,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 24,
    }
    return DecodeSettings(**{**values, **changes})


def some_requests(tiny, count: int, *, temperature: float = 0.0) -> list[Request]:
    requests = []
    for i, prompt in enumerate(template_prompts(count, seed=31, split="test")):
        text = tiny.verifier.chat_text(prompt.messages, add_generation_prompt=True)
        requests.append(
            Request(prompt_ids=tiny.verifier.encode(text), temperature=temperature, seed=1000 + i)
        )
    return requests


def test_greedy_acceptance_by_hand():
    best = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [9, 9, 9, 9]])
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [5, 6, 7], [1, 9, 9]])
    kept, bonus = accept_greedy(best, drafts, torch.tensor([3, 3, 1, 3]))
    assert kept.tolist() == [3, 1, 1, 0]  # the third row proposed one token only
    assert bonus.tolist() == [8, 6, 6, 9]


def test_acceptance_ratio_and_residual_by_hand():
    """p = (.5, .3, .2) over tokens 0..2; q = (.8, .2) over draft tokens that stand for 0 and 2."""
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
    q = torch.tensor([[[0.8, 0.2]]])
    kept_ids = torch.tensor([0, 2])

    def outcome(coin: float, last: float) -> tuple[int, int]:
        m, token = accept_sampled(
            p,
            q,
            torch.tensor([[0]]),
            torch.tensor([[0]]),
            torch.tensor([1]),
            kept_ids,
            torch.tensor([[coin, last]], dtype=torch.float64),
        )
        return int(m), int(token)

    assert outcome(0.624, 0.5) == (1, 2)  # p/q = 0.625: kept; the bonus comes from the second row
    assert outcome(0.626, 0.0) == (0, 1)  # residual max(p - q, 0) = (0, .3, 0): only token 1
    assert outcome(0.626, 0.999) == (0, 1)


@pytest.mark.parametrize("sampling", ["sampled", "greedy"])
def test_one_round_draws_from_the_verifier_exactly(sampling):
    """Chi-square on a toy vocabulary with a pruned draft: first emitted token against p, for 40,000 rounds."""
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(2, 7, generator=generator).softmax(-1) ** 2
    p = (p / p.sum(-1, keepdim=True)).float()
    kept_ids = torch.tensor([0, 2, 3, 6])
    q = (3 * torch.rand(1, 4, generator=generator)).softmax(-1)
    rounds = 40_000
    u = torch.rand(rounds, 4, generator=generator, dtype=torch.float64)
    ids = draw(q.expand(rounds, -1), u[:, 0]) if sampling == "sampled" else q.argmax().expand(rounds)
    drafts = kept_ids[ids]
    kept, bonus = accept_sampled(
        p.expand(rounds, 2, 7),
        q.expand(rounds, 1, 4) if sampling == "sampled" else None,
        drafts.unsqueeze(1),
        ids.unsqueeze(1),
        torch.ones(rounds, dtype=torch.int64),
        kept_ids,
        u[:, 1:3],
    )
    first = torch.where(kept == 1, drafts, bonus)
    statistic, degrees = chi_square(np.bincount(first, minlength=7), p[0].numpy())
    assert stats.chi2.sf(statistic, degrees) > 0.01
    second = bonus[kept == 1]
    statistic, degrees = chi_square(np.bincount(second, minlength=7), p[1].numpy())
    assert stats.chi2.sf(statistic, degrees) > 0.01
    expected = torch.minimum(p[0, kept_ids], q[0]).sum() if sampling == "sampled" else p[0, drafts[0]]
    assert kept.float().mean() == pytest.approx(float(expected), abs=0.01)


def test_a_wrong_acceptance_rule_fails_the_same_test():
    """Keeping a draft with probability p instead of p / q is a known slip; the test above must see it."""
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(7, generator=generator).softmax(-1) ** 2
    p = p / p.sum()
    q = (3 * torch.rand(7, generator=generator)).softmax(-1)
    u = torch.rand(20_000, 3, generator=generator, dtype=torch.float64)
    drafts = draw(q.expand(20_000, -1), u[:, 0])
    residual = (p - q).clamp(min=0)
    first = torch.where(u[:, 1] < p[drafts], drafts, draw(residual.expand(20_000, -1), u[:, 2]))
    statistic, degrees = chi_square(np.bincount(first, minlength=7), p.numpy())
    assert stats.chi2.sf(statistic, degrees) < 1e-6


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    torch.testing.assert_close(sampling_distribution(logits, 1.0, 2, 1.0), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    # The nucleus of 0.6 needs the second token; 0.4 is reached by the first alone.
    torch.testing.assert_close(sampling_distribution(logits, 1.0, 0, 0.6), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(sampling_distribution(logits, 1.0, 0, 0.39), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(
        sampling_distribution(logits, 0.5, 0, 1.0), torch.tensor([16.0, 9.0, 4.0, 1.0]) / 30
    )


@pytest.mark.parametrize("batch_size", [1, 5])
def test_greedy_text_is_the_verifiers_own(tiny, batch_size):
    requests = some_requests(tiny, 10)
    plain = dict(generate(tiny.verifier, requests, max_new_tokens=24, batch_size=3))
    rounds = list(
        decode(
            tiny.verifier, tiny.draft, requests, settings=settings(), batch_size=batch_size, diagnostics=False
        )
    )
    assert dict(responses(iter(rounds))) == plain
    assert sum(step.accepted for step in rounds) > 20  # the draft took part
    for step in rounds:
        assert len(step.tokens) in (step.accepted, step.accepted + 1)
        assert step.draft_ms >= 0
        assert step.verify_ms > 0


def test_sampled_text_does_not_depend_on_the_batch(tiny):
    """A request's seed decides its draws: alone, in company, and with blocks cut at different places beside it."""
    requests = some_requests(tiny, 9, temperature=1.0)
    for changes in (
        {"draft_sampling": "sampled"},
        {"draft_sampling": "sampled", "confidence_threshold": 0.6},
    ):
        options = {"settings": settings(**changes), "diagnostics": False}
        alone = dict(responses(decode(tiny.verifier, tiny.draft, requests, batch_size=1, **options)))
        together = dict(responses(decode(tiny.verifier, tiny.draft, requests, batch_size=9, **options)))
        same = [alone[i].token_ids == together[i].token_ids for i in range(len(requests))]
        # Sums in another order can move a draw across a boundary, once in very many tokens.
        assert sum(same) >= len(same) - 1


def test_squeezing_holes_out_of_the_cache_changes_nothing(tiny, monkeypatch):
    requests = some_requests(tiny, 8)
    options = {"settings": settings(), "batch_size": 8, "diagnostics": False}
    expected = dict(responses(decode(tiny.verifier, tiny.draft, requests, **options)))
    monkeypatch.setattr("dspark.decode.MAX_HOLES", 0)
    assert dict(responses(decode(tiny.verifier, tiny.draft, requests, **options))) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_rows_that_keep_different_counts_stay_lossless(family, monkeypatch):
    """Drafts are the true text up to a count that differs by row and round: every pattern of holes, sliding layers included."""
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    verifier = tiny_verifier(family, **(kinds if family == "gemma3" else {}))
    draft = random_draft(
        vocab_size=272, draft_vocab_size=272, mask_token_id=MASK, aux_layer_ids=AUX, num_verifier_layers=4
    ).eval()
    requests = [Request(prompt_ids=list(range(20, 20 + n)), temperature=0.0, seed=0) for n in (5, 13, 9, 12)]
    plain = dict(generate(verifier, requests, max_new_tokens=30, batch_size=1))

    def propose(batch: _Batch) -> _Block:
        rows = []
        for r, length in zip(batch.rows, batch.lengths.tolist(), strict=True):
            at = length - len(requests[r].prompt_ids) + 1
            truth = [*plain[r].token_ids[at : at + 3], 7, 7, 7][:3]
            good = (at + r) % 4
            rows.append([t if i < good else (t + 1) % 272 for i, t in enumerate(truth)])
        tokens = torch.tensor(rows)
        return _Block(tokens, tokens, torch.full((len(rows),), 3), None, None, None)

    monkeypatch.setattr(_Batch, "_propose", propose)
    options = settings(num_proposals=3, max_new_tokens=30)
    rounds = list(decode(verifier, draft, requests, settings=options, batch_size=4, diagnostics=False))
    assert dict(responses(iter(rounds))) == plain
    assert {step.accepted for step in rounds if not step.prefill} == {0, 1, 2, 3}


def test_text_ends_at_a_stop_token_inside_a_block_and_at_the_limit(tiny):
    requests = some_requests(tiny, 12)
    rounds = list(
        decode(tiny.verifier, tiny.draft, requests, settings=settings(), batch_size=12, diagnostics=True)
    )
    stop = set(tiny.verifier.info.eos_token_ids)
    for i, answer in responses(iter(rounds)):
        assert not stop & set(answer.token_ids[:-1])
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] in stop)
        assert len(answer.token_ids) <= 24, i
    ended_by_draft = [r for r in rounds if r.finish_reason == "stop" and len(r.tokens) == r.accepted]
    assert ended_by_draft, "no text ended at a kept draft; the test has lost its case"
    for step in ended_by_draft:
        assert max(step.slots["position"]) == step.accepted  # nothing is reached beyond the text

    short = list(
        decode(
            tiny.verifier,
            tiny.draft,
            requests,
            settings=settings(),
            batch_size=12,
            diagnostics=False,
            limits=[1 + i % 6 for i in range(12)],
        )
    )
    full = dict(responses(iter(rounds)))
    for i, answer in responses(iter(short)):
        assert answer.token_ids == full[i].token_ids[: 1 + i % 6]


def test_confidence_threshold_above_one_is_plain_decoding(tiny):
    requests = some_requests(tiny, 4)
    options = settings(confidence_threshold=1.1)
    rounds = list(
        decode(tiny.verifier, tiny.draft, requests, settings=options, batch_size=4, diagnostics=True)
    )
    assert all(len(step.tokens) == 1 and step.proposed == 0 for step in rounds)
    plain = dict(generate(tiny.verifier, requests, max_new_tokens=24, batch_size=4))
    assert dict(responses(iter(rounds))) == plain


@pytest.mark.parametrize("anchor_first", [False, True], ids=["fill-in", "anchor-first"])
def test_a_draft_that_has_learnt_one_document_is_nearly_always_kept(tiny, tmp_path, anchor_first):
    """Overfit one text and decode it for real: at least 0.9 (N + 1) tokens a round, in either layout."""
    prompts = template_prompts(4, seed=41, split="train")
    cache = build_cache(tmp_path / "one", tiny.verifier, prompts, temperature=0.0, max_new_tokens=72)
    number = max(range(len(cache)), key=lambda i: cache.info(i).response_tokens)
    draft = new_draft(cache, sample_from_anchor=anchor_first, block_size=4, draft_vocab_size=60)
    train_draft(draft, cache, [number], steps=90, lr=6e-3, anchors=96)
    proposals = draft.config.num_proposals
    ids, mask = cache.tokens(number)
    start = int(mask.nonzero()[0])
    request = Request(prompt_ids=ids[:start].tolist(), temperature=0.0, seed=0)
    rounds = [
        step
        for step in decode(
            tiny.verifier,
            draft,
            [request],
            settings=settings(num_proposals=proposals, max_new_tokens=72),
            batch_size=1,
            diagnostics=False,
        )
        if not step.prefill
    ]
    whole = rounds[:-1]  # the last round is cut by the end of the text
    emitted = sum(len(step.tokens) for step in whole) / len(whole)
    assert len(whole) >= 3
    assert emitted >= 0.9 * (proposals + 1)
    batch, _ = HeldOutDocuments(cache, [number], dtype=torch.bfloat16)[0]
    replay = replay_document(
        draft,
        batch,
        temperature=0.0,
        draft_sampling="greedy",
        num_proposals=proposals,
        confidence_threshold=None,
    )
    assert replay.accepted.sum() == sum(step.accepted for step in rounds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.0}, "top_p 0.0; expected top_k >= 0 and 0 < top_p <= 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_requests_that_cannot_be_decoded_are_refused(tiny):
    request = Request(prompt_ids=[], temperature=0.0, seed=0)
    with pytest.raises(ValueError, match="request 0 has an empty prompt"):
        next(
            decode(tiny.verifier, tiny.draft, [request], settings=settings(), batch_size=1, diagnostics=False)
        )
    request = replace(request, prompt_ids=[1, 2])
    with pytest.raises(ValueError, match="hidden size 32 and 97 embedding rows"):
        next(
            decode(
                tiny.verifier,
                random_draft(block_size=5),
                [request],
                settings=settings(),
                batch_size=1,
                diagnostics=False,
            )
        )
