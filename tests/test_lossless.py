"""The losslessness kit: token logs, ties, and chi-square tests that notice a biased decoder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.data.generation import Request, generate
from dspark.decode import DecodeSettings, decode, responses
from dspark.lossless import (
    LogEntry,
    chi_square,
    compare_greedy,
    conditional_test,
    first_divergence,
    read_log,
    two_sample_test,
)


def entry(*tokens: int, prompt: tuple[int, ...] = (1, 2), temperature: float | None = None) -> LogEntry:
    return LogEntry(prompt, tokens, temperature)


def samples(tiny, count: int, *, speculative: bool, seed: int, **changes) -> list[LogEntry]:
    """Short samples of one prompt."""
    prompt = tuple(tiny.verifier.encode("<|bos|><|user|>8+5?972<|end|><|assistant|>"))
    requests = [Request(prompt_ids=prompt, temperature=1.0, seed=seed + i) for i in range(count)]
    settings = DecodeSettings(
        **{
            "draft_sampling": "sampled",
            "num_proposals": 4,
            "confidence_threshold": None,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 4,
            **changes,
        }
    )
    answers = (
        responses(
            decode(tiny.verifier, tiny.draft, requests, settings=settings, batch_size=128, diagnostics=False)
        )
        if speculative
        else generate(tiny.verifier, requests, max_new_tokens=4, batch_size=128)
    )
    return [LogEntry(prompt, tuple(answer.token_ids), 1.0) for _, answer in answers]


def test_chi_square_by_hand():
    statistic, degrees = chi_square(np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25]))
    assert (statistic, degrees) == (pytest.approx(1.0 + 0.0 + 1.0), 2)
    # Outcomes expected fewer than five times share a bin; here the last three of 100 draws.
    statistic, degrees = chi_square(np.array([60, 34, 2, 2, 2]), np.array([0.6, 0.34, 0.02, 0.02, 0.02]))
    assert (statistic, degrees) == (pytest.approx(0.0), 2)
    assert chi_square(np.array([9, 1]), np.array([1.0, 0.0])) == (float("inf"), 1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_sampling": "greedy"}, {"top_k": 6}, {"top_p": 0.8, "num_proposals": 2}],
    ids=["sampled", "greedy draft", "top-k", "top-p"],
)
def test_speculative_samples_follow_the_verifier(tiny, changes):
    """Tokens 1 to 3 of 768 samples against the verifier's exact conditional distributions; the seed is fixed."""
    drawn = samples(tiny, 768, speculative=True, seed=0, **changes)
    test = conditional_test(
        drawn,
        tiny.verifier,
        temperature=1.0,
        top_k=changes.get("top_k", 0),
        top_p=changes.get("top_p", 1.0),
        positions=(1, 2, 3),
    )
    # One seed, but processors round differently and draw other samples: p-values over seeds are uniform (LOG, 2026-12-03).
    assert test.p_value > 1e-3, test
    assert test.degrees >= 5
    if "top_k" in changes:  # the same samples are not samples of the uncut distribution
        whole = conditional_test(
            drawn, tiny.verifier, temperature=1.0, top_k=0, top_p=1.0, positions=(1, 2, 3)
        )
        assert whole.p_value < 1e-4


def test_a_biased_decoder_is_noticed(tiny, monkeypatch):
    """Drawing the replacement from p instead of the residual is the commonest slip; both tests must see it."""
    import dspark.decode as module

    honest = samples(tiny, 768, speculative=False, seed=50_000)
    right = samples(tiny, 768, speculative=True, seed=0)
    assert two_sample_test(honest, right, position=1).p_value > 0.01
    true_rule = module.accept_sampled

    def from_p(p, q, drafts, draft_ids, proposed, kept_ids, coins):
        kept, _ = true_rule(p, q, drafts, draft_ids, proposed, kept_ids, coins)
        return kept, module.draw(p[torch.arange(len(p)), kept], coins[:, -1])

    monkeypatch.setattr(module, "accept_sampled", from_p)
    wrong = samples(tiny, 768, speculative=True, seed=0)
    test = conditional_test(wrong, tiny.verifier, temperature=1.0, top_k=0, top_p=1.0, positions=(1, 2, 3))
    assert test.p_value < 1e-3


def test_two_samples_of_one_distribution_are_seldom_told_apart():
    """p-values of 200 comparisons of equal distributions look uniform; of different ones they are small."""
    rng = np.random.default_rng(0)
    p = np.array([0.4, 0.3, 0.2, 0.1])

    def log(q: np.ndarray) -> list[LogEntry]:
        return [entry(int(t)) for t in rng.choice(4, size=300, p=q)]

    values = [two_sample_test(log(p), log(p), position=0).p_value for _ in range(200)]
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert two_sample_test(log(p), log(p[::-1]), position=0).p_value < 1e-10


def test_first_divergence_counts_early_ends():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_divergence_is_a_tie_only_where_the_verifier_holds_both_tokens_level(tiny):
    prompt = tuple(tiny.verifier.encode("<|bos|><|user|>3+4?<|end|><|assistant|>"))
    request = Request(prompt_ids=prompt, temperature=0.0, seed=0)
    ((_, answer),) = generate(tiny.verifier, [request], max_new_tokens=8, batch_size=1)
    text = list(answer.token_ids)
    ids = torch.tensor([[*prompt, *text[:2]]])
    with torch.inference_mode():
        hidden = tiny.verifier.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        logits = tiny.verifier.next_logits(hidden)[0]
    second = int(logits.topk(2).indices[1])
    gap = float(logits.max() - logits[second])
    reference, other = [entry(*text, prompt=prompt)], [entry(*text[:2], second, prompt=prompt)]
    row = compare_greedy(reference, other, tiny.verifier).iloc[0]
    assert (row["verdict"], row["divergence"]) == ("different", 2)
    assert row["gap"] == pytest.approx(gap, abs=1e-4)
    assert row["margin"] == pytest.approx(gap, abs=1e-4)
    row = compare_greedy(reference, other, tiny.verifier, tie_logits=gap + 0.01).iloc[0]
    assert row["verdict"] == "tie"
    # Level with each other but far below the best token is no tie.
    third, fourth = logits.topk(40).indices[-2:].tolist()
    a, b = [entry(*text[:2], third, prompt=prompt)], [entry(*text[:2], fourth, prompt=prompt)]
    close = float((logits[third] - logits[fourth]).abs()) + 0.01
    assert compare_greedy(a, b, tiny.verifier, tie_logits=close).iloc[0]["verdict"] == "different"
    assert compare_greedy(a, b, None).iloc[0]["verdict"] == "unexplained"
    assert compare_greedy([entry(1, 2)], [entry(1)], None).iloc[0]["verdict"] == "length"


def test_logs_are_read_back_and_bad_ones_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        json.dumps({"prompt_token_ids": [1, 2], "token_ids": [3], "temperature": 0, "text": "x"}) + "\n\n"
    )
    assert read_log(path) == [LogEntry((1, 2), (3,), 0.0)]
    path.write_text('{"prompt_token_ids": [1]}\n')
    with pytest.raises(ValueError, match=r"line 1 is no log entry .*token_ids"):
        read_log(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_log(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_log(tmp_path / "none.jsonl")


def test_logs_without_a_common_prompt_and_thin_samples_are_refused(tiny):
    with pytest.raises(ValueError, match="share no prompt_token_ids"):
        compare_greedy([entry(1)], [entry(1, prompt=(9,))], None)
    with pytest.raises(ValueError, match="share no prompt"):
        two_sample_test([entry(1)], [entry(1, prompt=(9,))], position=0)
    with pytest.raises(ValueError, match="no prompt has 50 responses"):
        conditional_test([entry(1, 2)], tiny.verifier, temperature=1.0, top_k=0, top_p=1.0, positions=(1,))
