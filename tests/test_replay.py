"""Replay: exact acceptance along cached text, against decoding and against hand-made cases."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from dspark import evaluation
from dspark.blocks import DraftBatch
from dspark.data.batches import HeldOutDocuments, all_anchors, collate_documents
from dspark.data.generation import Request
from dspark.decode import DecodeSettings, decode
from dspark.evaluation import CachedTargets, decode_tables, replay_tables, summarise
from dspark.losses import target_probabilities
from dspark.replay import replay_document, replay_documents
from tests.trained import build_cache, template_prompts

GREEDY = {"draft_sampling": "greedy", "confidence_threshold": None}


def replayed(draft, cache, **changes):
    options = {"num_proposals": draft.config.num_proposals, **GREEDY, **changes}
    documents = options.pop("documents", list(range(len(cache))))
    return replay_tables(draft, cache, documents, run_id="r", dataset="d", **options)


def requests_of(cache, seed=0):
    """One request a response, with its length and document."""
    requests, limits, origins = [], [], {}
    for number in range(len(cache)):
        ids, mask = cache.tokens(number)
        info = cache.info(number)
        place = mask.nonzero()[:, 0]
        starts = [int(p) for i, p in enumerate(place) if i == 0 or place[i - 1] != p - 1]
        for turn, start in enumerate(starts):
            length = int((~mask[start:]).long().argmax()) or len(ids) - start
            origins[len(requests)] = {
                "domain": info.domain,
                "prompt_id": info.prompt_id,
                "doc_id": info.doc_id,
                "temperature": info.temperature,
            }
            requests.append(
                Request(
                    prompt_ids=ids[:start].tolist(),
                    temperature=info.temperature,
                    seed=10_000 * seed + 97 * number + turn,
                )
            )
            limits.append(length)
    return requests, limits, origins


def decoded(verifier, draft, cache, *, batch_size, seed=0, limits=None, **changes):
    settings = DecodeSettings(
        **{
            "num_proposals": draft.config.num_proposals,
            **GREEDY,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 28,
            **changes,
        }
    )
    requests, own, origins = requests_of(cache, seed)
    rounds = list(
        decode(
            verifier,
            draft,
            requests,
            settings=settings,
            batch_size=batch_size,
            diagnostics=True,
            limits=limits or own,
        )
    )
    return decode_tables(rounds, origins, run_id="r", dataset="d", settings=settings)


def paired_rounds(replay_rounds: pd.DataFrame, decode_rounds: pd.DataFrame) -> pd.DataFrame:
    keys = ["doc_id", "anchor"]
    a = replay_rounds[replay_rounds["visit"] > 0.5].set_index(keys)[["accepted", "proposed", "emitted"]]
    b = decode_rounds[decode_rounds["visit"] > 0.5].set_index(keys)[["accepted", "proposed", "emitted"]]
    return a.join(b, how="outer", lsuffix="_replay", rsuffix="_decode")


@pytest.fixture(scope="module")
def greedily(tiny):
    """The greedy cache's prompts, decoded for real."""
    return decoded(tiny.verifier, tiny.draft, tiny.greedy, batch_size=24)


@pytest.mark.parametrize(
    "changes", [{}, {"num_proposals": 2}, {"confidence_threshold": 0.55}], ids=["all", "two", "threshold"]
)
def test_greedy_replay_equals_decoding_round_by_round(tiny, greedily, changes):
    """Same rounds at the same places with the same number of kept drafts; a tie would show as a row that differs."""
    _, rounds = replayed(tiny.draft, tiny.greedy, **changes)
    _, real = (
        decoded(tiny.verifier, tiny.draft, tiny.greedy, batch_size=24, **changes) if changes else greedily
    )
    both = paired_rounds(rounds, real)
    for name in ("accepted", "emitted"):
        differing = both[(both[f"{name}_replay"] - both[f"{name}_decode"]).abs().fillna(1) > 1e-9]
        assert differing.empty, f"rounds that differ:\n{differing}"
    assert len(both) > 300
    if "confidence_threshold" in changes:
        assert both["proposed_decode"].nunique() > 2  # the threshold really cut blocks
        # Beyond the first rejection replay conditions on the text and decoding on its own drafts.
        seen = [both[f"proposed_{m}"].clip(upper=both["accepted_replay"] + 1) for m in ("replay", "decode")]
        assert (seen[0] == seen[1]).all()


def test_slot_values_of_replay_equal_those_of_decoding(tiny, greedily):
    """What calibration reads must not depend on how it was measured."""
    slots, _ = replayed(tiny.draft, tiny.greedy)
    real, _ = greedily
    keys = ["doc_id", "anchor", "position"]
    names = ["alpha", "confidence", "p_prefix_survives", "entropy", "max_prob", "margin", "r", "accepted"]
    both = slots.set_index(keys)[names].join(
        real[real["reached"] > 0].set_index(keys)[names], how="inner", rsuffix="_decode"
    )
    assert len(both) == (slots["reached"] > 0).sum() > 800
    for name in names:
        np.testing.assert_allclose(both[name], both[f"{name}_decode"], atol=2e-3, err_msg=name)


@pytest.mark.parametrize("sampling", ["sampled", "greedy"])
def test_sampled_replay_agrees_with_decoding_in_distribution(tiny, sampling):
    """tau and every conditional rate within the joint 95 % interval, bootstrapped over 150 prompts; seeds are fixed."""
    slots, rounds = replayed(tiny.draft, tiny.sampled, draft_sampling=sampling)
    limits = [28] * len(tiny.sampled)
    real_slots, real_rounds = decoded(
        tiny.verifier, tiny.draft, tiny.sampled, batch_size=64, limits=limits, draft_sampling=sampling
    )
    width = tiny.draft.config.num_proposals

    def sums(slots, rounds):
        frame = (
            rounds.assign(kept=rounds["visit"] * rounds["accepted"])
            .groupby("prompt_id")[["visit", "kept"]]
            .sum()
        )
        wide = slots.pivot_table(
            index="prompt_id", columns="position", values=["reached", "accepted"], aggfunc="sum", fill_value=0
        )
        return np.concatenate([frame.to_numpy(), wide.reindex(frame.index, fill_value=0).to_numpy()], axis=1)

    def statistics(total):  # accepted_1..N come before reached_1..N in the pivot
        kept, reached = total[..., 2 : 2 + width], total[..., 2 + width :]
        return np.concatenate([1 + total[..., 1:2] / total[..., :1], kept / reached], axis=-1)

    rng = np.random.default_rng(0)
    a, b = sums(slots, rounds), sums(real_slots, real_rounds)
    assert min(len(a), len(b)) > 140  # a prompt answered by an end token alone has no round
    spread = []
    for table in (a, b):
        weights = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=800)
        spread.append(statistics(weights @ table))
    half = np.sqrt(sum(s.var(0) for s in spread)) * 1.96
    difference = np.abs(statistics(a.sum(0)) - statistics(b.sum(0)))
    assert (difference <= half).all(), f"differences {difference}, allowed {half}"
    assert (half[:3] < 0.25).all()  # the test can tell two drafts apart


def test_packed_documents_replay_as_they_do_alone(tiny):
    documents = tiny.greedy.select(split="test")[:6]
    tensors = [tiny.greedy[d] for d in documents]
    starts = np.cumsum([0, *[len(d.input_ids) for d in tensors]])
    row = collate_documents(tensors, int(starts[-1]), torch.bfloat16)
    anchors, valid = all_anchors(row)
    options = {"temperature": 0.0, "num_proposals": 4, **GREEDY}
    packed = replay_documents(
        tiny.draft,
        DraftBatch(**row, anchors=anchors, anchor_valid=valid),
        starts[:-1].tolist(),
        chunk_anchors=11,
        **options,
    )
    alone = HeldOutDocuments(tiny.greedy, documents, dtype=torch.bfloat16)
    for i, replay in enumerate(packed):
        single = replay_document(tiny.draft, alone[i][0], **options)
        assert np.array_equal(single.anchors, replay.anchors)
        assert np.array_equal(single.keep, replay.keep)
        np.testing.assert_allclose(single.visit, replay.visit, atol=1e-12)
        np.testing.assert_allclose(single.alpha[single.inside], replay.alpha[replay.inside], atol=1e-4)


def test_a_text_of_one_token_has_no_rounds(tiny):
    batch, _ = HeldOutDocuments(tiny.greedy, [0], dtype=torch.bfloat16)[0]
    batch.loss_mask[0, int(batch.loss_mask[0].long().argmax()) + 1 :] = False
    anchors, valid = all_anchors({"loss_mask": batch.loss_mask, "doc_start": batch.doc_start})
    batch = replace(batch, anchors=anchors, anchor_valid=valid)
    replay = replay_document(tiny.draft, batch, temperature=0.0, num_proposals=4, **GREEDY)
    assert replay.rounds == 0
    assert replay.keep.shape == replay.alpha.shape == (0, 4)


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def test_rows_replayed_side_by_side_are_those_of_one_thread(tiny, three_threads, monkeypatch):
    monkeypatch.setattr(evaluation, "ROW_TOKENS", 100)
    workers, whole = [], evaluation.replay_documents

    def noting(*inputs, **options):
        workers.append((threading.get_ident(), torch.get_num_threads()))
        return whole(*inputs, **options)

    monkeypatch.setattr(evaluation, "replay_documents", noting)
    finished: list[int] = []
    cache = tiny.sampled
    side_by_side = replayed(tiny.draft, cache, progress=finished.append)
    assert len(workers) == len(finished) > 6
    assert sum(finished) == len(cache)
    assert len({thread for thread, _ in workers}) > 1
    assert {threads for _, threads in workers} == {1}
    assert torch.get_num_threads() == 3
    one_after_another = iter(
        [
            pd.concat(frames, ignore_index=True)
            for frames in zip(
                *(replayed(tiny.draft, cache, documents=[d]) for d in range(len(cache))), strict=True
            )
        ]
    )
    for found, wanted in zip(side_by_side, one_after_another, strict=True):
        keys = [name for name in ("doc_id", "anchor", "position") if name in found]
        found, wanted = (frame.sort_values(keys, ignore_index=True) for frame in (found, wanted))
        pd.testing.assert_frame_equal(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_row_that_fails_is_raised_and_gives_the_threads_back(tiny, three_threads, monkeypatch):
    monkeypatch.setattr(evaluation, "ROW_TOKENS", 100)
    monkeypatch.setattr(evaluation, "replay_documents", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replayed(tiny.draft, tiny.greedy)
    assert torch.get_num_threads() == 3


def test_one_row_keeps_all_threads(tiny, three_threads, monkeypatch):
    seen, whole = [], evaluation.replay_documents

    def noting(*inputs, **options):
        seen.append(torch.get_num_threads())
        return whole(*inputs, **options)

    monkeypatch.setattr(evaluation, "replay_documents", noting)
    replayed(tiny.draft, tiny.greedy, documents=[0])
    assert seen == [3]


def test_teacher_forced_expectation_is_labelled_apart_from_the_walk(tiny, greedily):
    """The mean over all anchors, which training reports, differs from the walk that decoding takes; both are recoverable."""
    slots, rounds = replayed(tiny.draft, tiny.greedy)
    walk = summarise(slots, rounds)["tau"]
    teacher_forced = 1.0 + rounds["accepted"].mean()
    weighted = 1.0 + (rounds["visit"] * rounds["accepted"]).sum() / rounds["visit"].sum()
    assert walk == pytest.approx(weighted)
    assert abs(teacher_forced - walk) > 0.01
    _, real = greedily
    real = real[real["visit"] > 0]
    assert walk == pytest.approx(1.0 + real["accepted"].sum() / len(real), abs=1e-9)


def test_visits_and_emitted_tokens_cover_every_text(tiny):
    """A first token from the prefill, then what the rounds emit: together the text, whatever the drafts are worth."""
    for cache, sampling in ((tiny.greedy, "greedy"), (tiny.sampled, "sampled")):
        _, rounds = replayed(tiny.draft, cache, draft_sampling=sampling)
        emitted = (rounds["visit"] * rounds["emitted"]).groupby(rounds["doc_id"]).sum()
        for number in range(len(cache)):
            info = cache.info(number)
            if info.response_tokens > 1:
                turns = len(requests_of_one(cache, number))
                assert emitted[info.doc_id] == pytest.approx(info.response_tokens - turns, abs=1e-6)


def requests_of_one(cache, number):
    _, mask = cache.tokens(number)
    place = mask.nonzero()[:, 0].tolist()
    return [p for i, p in enumerate(place) if i == 0 or place[i - 1] != p - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_pruned_alpha_and_rates_equal_the_full_head(tiny, tmp_path, temperature):
    """p is normalised over the whole verifier vocabulary at the text's own temperature: compare with a full softmax."""
    cache = tiny.greedy if temperature == 0 else tiny.sampled
    if temperature == 0.7:
        prompts = template_prompts(5, seed=21, split="test")
        cache = build_cache(tmp_path / "warm", tiny.verifier, prompts, temperature=0.7)
    sampling = "greedy" if temperature == 0 else "sampled"
    slots, _ = replayed(tiny.draft, cache, documents=[0, 1], draft_sampling=sampling)
    document = cache[0]
    row = collate_documents([document], len(document.input_ids), torch.bfloat16)
    anchors, valid = all_anchors(row)
    inside = row["loss_mask"][0, anchors[0]]
    batch = DraftBatch(**row, anchors=anchors[:, inside], anchor_valid=valid[:, inside])
    with torch.no_grad():
        output = tiny.draft(batch)
        logits = tiny.draft.logits(output.hidden, output.features)[0]
        head = tiny.greedy.verifier_weights()["lm_head.weight"].float()
        full = (document.last.float() @ head.T) / (temperature or 1.0)
        p = full.softmax(-1)[output.blocks.target_index[0]][..., tiny.draft.kept_ids]
        q = (logits / (temperature or 1.0)).softmax(-1)
    expected = torch.minimum(p, q).sum(-1)[output.blocks.supervised[0]]
    mine = slots[slots["doc_id"] == document.info.doc_id]
    np.testing.assert_allclose(mine["alpha"], expected, atol=2e-4)
    if temperature:
        label = tiny.draft.vocab.target_to_draft(output.blocks.labels)[0]
        safe = label.clamp(min=0).unsqueeze(-1)
        ratio = (q.gather(-1, safe) / p.gather(-1, safe)).squeeze(-1).clamp(max=1.0)
        r = torch.where(label >= 0, ratio, 0.0)[output.blocks.supervised[0]]
        np.testing.assert_allclose(mine["r"], r, rtol=2e-3, atol=2e-4)


def test_final_norm_is_applied_to_caches_that_hold_the_state_before_it(tiny):
    """vLLM and speculators capture `last` before the norm; replay must see the same p from both forms."""
    number = 0
    document = tiny.greedy[number]
    targets = CachedTargets(tiny.greedy)
    raw = torch.randn(1, len(document.input_ids), tiny.draft.config.hidden_size)
    row = collate_documents([document], len(document.input_ids), torch.float32)
    anchors, valid = all_anchors(row)
    batch = DraftBatch(**{**row, "last": raw}, anchors=anchors, anchor_valid=valid)
    assert targets.normed(batch) is batch
    targets.manifest = replace(targets.manifest, last="pre_norm")
    weight = targets.weights["norm.weight"].float()
    eps = tiny.greedy.manifest.verifier.rms_norm_eps
    expected = raw / (raw.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    torch.testing.assert_close(targets.normed(batch).last, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4], ids=["one token", "several tokens"])
def test_text_at_another_temperature_needs_its_own_log_sum_exp(tiny, length):
    """Also where the text is too short for a single anchor, so that nothing would be computed."""
    number = max(range(len(tiny.sampled)), key=lambda d: tiny.sampled.info(d).response_tokens)
    document = tiny.sampled[number]
    row = collate_documents([document], len(document.input_ids), torch.bfloat16)
    start = int(row["loss_mask"][0].nonzero()[0])
    row["loss_mask"][0, start + length :] = False
    anchors, valid = all_anchors(row)
    assert int(row["loss_mask"][0, anchors[0]].sum()) == length - 1  # those that replay begins rounds at
    batch = DraftBatch(**row, anchors=anchors, anchor_valid=valid)
    with pytest.raises(ValueError, match="log-sum-exp at that temperature"):
        replay_document(tiny.draft, batch, temperature=0.5, num_proposals=4, **GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_proposals": 5}, "num_proposals is 5; this draft was trained for 1 to 4"),
        ({"num_proposals": 0}, "num_proposals is 0"),
        ({"draft_sampling": "beam"}, "draft_sampling is 'beam'; expected one of"),
        ({"draft_sampling": "sampled"}, "draft_sampling=sampled needs temperature > 0"),
        ({"temperature": -1.0}, "temperature is -1.0; expected 0"),
    ],
)
def test_impossible_ways_of_drafting_are_refused(tiny, changes, message):
    batch, _ = HeldOutDocuments(tiny.greedy, [0], dtype=torch.bfloat16)[0]
    options = {"temperature": 0.0, "num_proposals": 4, **GREEDY, **changes}
    with pytest.raises(ValueError, match=message):
        replay_document(tiny.draft, batch, **options)


def test_threshold_without_a_confidence_head_is_refused(tiny):
    headless = replace(tiny.draft.config, confidence=False, confidence_uses_prev_embedding=False)
    draft = type(tiny.draft)(headless, attention_backend="grouped")
    batch, _ = HeldOutDocuments(tiny.greedy, [0], dtype=torch.bfloat16)[0]
    with pytest.raises(ValueError, match="no confidence head"):
        replay_document(
            draft,
            batch,
            temperature=0.0,
            num_proposals=4,
            draft_sampling="greedy",
            confidence_threshold=0.5,
        )


def test_target_probabilities_of_the_cache_sum_to_the_kept_mass(tiny):
    document = tiny.greedy[0]
    weights = tiny.greedy.verifier_weights()["lm_head.weight"]
    p = target_probabilities(document.last.float(), document.lse, weights.float(), 1.0, "verifier_vocab")
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p)), rtol=0, atol=1e-4)
