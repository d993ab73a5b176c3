"""Is speculative text the verifier's own? Comparisons of token logs, of this decoder or of any engine.

Temperature 0: equal token by token, and where two texts part the gap between the two logits tells a tie from a defect.
Temperature > 0: chi-square tests of drawn tokens against the verifier's exact conditional distribution, or of two logs.

A log is JSONL, one response a line: `prompt_token_ids`, `token_ids`, optionally `temperature`; other keys are ignored.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

from dspark.decode import sampling_distribution
from dspark.verifier import Verifier

# Largest logit gap that rounding can explain, by compute dtype: sums of a few hundred products of that precision.
TIE_LOGITS = {"float32": 1e-3, "bfloat16": 0.25}


@dataclass(frozen=True)
class LogEntry:
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float | None


def read_log(path: str | Path) -> list[LogEntry]:
    """Responses of a JSONL log. Raises ValueError, with the line, for a file that is missing, empty or of another form."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"token log {path} does not exist.")
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            temperature = row.get("temperature")
            entries.append(
                LogEntry(
                    prompt_token_ids=tuple(int(t) for t in row["prompt_token_ids"]),
                    token_ids=tuple(int(t) for t in row["token_ids"]),
                    temperature=None if temperature is None else float(temperature),
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} line {number} is no log entry ({error!r}); expected an object with prompt_token_ids and token_ids."
            ) from error
    if not entries:
        raise ValueError(f"token log {path} is empty.")
    return entries


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token at which two texts differ, None if equal; a text that ends early differs at its end."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare_greedy(
    reference: Sequence[LogEntry],
    other: Sequence[LogEntry],
    verifier: Verifier | None,
    *,
    tie_logits: float | None = None,
) -> pd.DataFrame:
    """One row a prompt of both logs: where the texts part, and whether the verifier held the two tokens to be level.

    Columns: prompt (number in `reference`), tokens compared, divergence (nan if equal), token_reference, token_other,
    gap = |logit difference of the two tokens|, margin = top-1 less top-2 logit there, verdict: equal, tie (gap at most
    `tie_logits`, by default that of the verifier's dtype), different, length (one text is the other's beginning), or
    unexplained (no verifier to ask). Raises ValueError if the logs share no prompt.
    """
    texts = {entry.prompt_token_ids: entry.token_ids for entry in other}
    rows = []
    for number, entry in enumerate(reference):
        text = texts.get(entry.prompt_token_ids)
        if text is None:
            continue
        at = first_divergence(entry.token_ids, text)
        row = {"prompt": number, "tokens": max(len(entry.token_ids), len(text)), "verdict": "equal"}
        if at is not None and at >= min(len(entry.token_ids), len(text)):
            row |= {"divergence": at, "verdict": "length"}
        elif at is not None:
            mine, theirs = entry.token_ids[at], text[at]
            row |= {
                "divergence": at,
                "token_reference": mine,
                "token_other": theirs,
                "verdict": "unexplained",
            }
            if verifier is not None:
                logits = _next_logits(verifier, [[*entry.prompt_token_ids, *entry.token_ids[:at]]])[0]
                top = logits.topk(2).values
                gap = float((logits[mine] - logits[theirs]).abs())
                allowed = TIE_LOGITS[verifier.info.compute_dtype] if tie_logits is None else tie_logits
                level = gap <= allowed and float(top[0] - max(logits[mine], logits[theirs])) <= allowed
                row |= {
                    "gap": gap,
                    "margin": float(top[0] - top[1]),
                    "verdict": "tie" if level else "different",
                }
        rows.append(row)
    if not rows:
        raise ValueError("the two logs share no prompt_token_ids; they answer different prompts.")
    columns = ["prompt", "tokens", "verdict", "divergence", "token_reference", "token_other", "gap", "margin"]
    return pd.DataFrame(rows).reindex(columns=columns)


@dataclass(frozen=True)
class ChiSquare:
    """`p_value` is the chance of a statistic at least this large if both distributions are equal."""

    statistic: float
    degrees: int
    p_value: float
    draws: int


def chi_square(counts: np.ndarray, probabilities: np.ndarray, *, minimum: float = 5.0) -> tuple[float, int]:
    """Pearson's statistic and degrees of freedom of counts against exact probabilities [W].

    Outcomes that `probabilities` rules out must not occur: one that does makes the statistic infinite. Outcomes expected fewer
    than `minimum` times share one bin.
    """
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    expected = probabilities / probabilities.sum() * counts.sum()
    if counts[expected <= 0].any():
        return float("inf"), 1
    large = expected >= minimum
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < minimum and len(wanted) > 1:  # the rest is too small for a bin of its own
        order = np.argsort(wanted[:-1])
        wanted[order[0]] += wanted[-1]
        observed[order[0]] += observed[-1]
        wanted, observed = wanted[:-1], observed[:-1]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def conditional_test(
    entries: Sequence[LogEntry],
    verifier: Verifier,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    positions: Sequence[int],
    minimum_draws: int = 50,
) -> ChiSquare:
    """Test drawn tokens against the verifier: does token `i` follow p(. | prompt, tokens before it), for i in `positions`?

    Positions count from 0; a prefill draws token 0, so speculation shows from 1 on. Responses with the same prompt and the same
    first tokens are draws from one distribution; those with at least `minimum_draws` are tested and their statistics added.

    Raises ValueError if no group is large enough.
    """
    groups: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for entry in entries:
        for i in positions:
            if i < len(entry.token_ids):
                groups[entry.prompt_token_ids + entry.token_ids[:i]][entry.token_ids[i]] += 1
    tested = {prefix: c for prefix, c in groups.items() if c.total() >= minimum_draws}
    if not tested:
        raise ValueError(
            f"no prompt has {minimum_draws} responses with equal first tokens; draw more samples of fewer prompts."
        )
    statistic, degrees, draws = 0.0, 0, 0
    for prefix, counter in tested.items():
        p = sampling_distribution(
            _next_logits(verifier, [list(prefix)])[0], temperature, top_k, top_p
        ).double()
        counts = np.zeros(len(p))
        for token, count in counter.items():
            counts[token] = count
        value, free = chi_square(counts, p.cpu().numpy())
        statistic, degrees, draws = statistic + value, degrees + free, draws + counter.total()
    p_value = float(stats.chi2.sf(statistic, max(1, degrees)))
    return ChiSquare(statistic, degrees, p_value, draws)


def two_sample_test(a: Sequence[LogEntry], b: Sequence[LogEntry], *, position: int) -> ChiSquare:
    """Test whether two logs of samples of the same prompts draw token `position` alike, without a verifier.

    Raises ValueError if the logs share no prompt with such a token.
    """
    tables: dict[tuple[int, ...], tuple[Counter[int], Counter[int]]] = defaultdict(
        lambda: (Counter(), Counter())
    )
    for which, entries in enumerate((a, b)):
        for entry in entries:
            if position < len(entry.token_ids):
                tables[entry.prompt_token_ids][which][entry.token_ids[position]] += 1
    statistic, degrees, draws = 0.0, 0, 0
    for first, second in tables.values():
        if not first or not second:
            continue
        total = first.total() + second.total()
        seen = first + second
        # A token is a bin of its own when the smaller sample is expected to hold it five times.
        enough = 5.0 * total / min(first.total(), second.total())
        large = [token for token, count in seen.items() if count >= enough]
        table = np.array(
            [[c[t] for t in large] + [c.total() - sum(c[t] for t in large)] for c in (first, second)]
        )
        table = table[:, table.sum(0) > 0]
        draws += total
        if table.shape[1] > 1:
            result = stats.chi2_contingency(table, correction=False)
            statistic, degrees = statistic + float(result.statistic), degrees + int(result.dof)
    if not draws:
        raise ValueError(f"the two logs share no prompt whose responses have a token {position}.")
    p_value = float(stats.chi2.sf(statistic, max(1, degrees)))
    return ChiSquare(statistic, degrees, p_value, draws)


@torch.inference_mode()
def _next_logits(verifier: Verifier, rows: list[list[int]]) -> torch.Tensor:
    """fp32 logits [rows, W] after token rows of one length."""
    ids = torch.tensor(rows, device=verifier.device)
    return verifier.next_logits(verifier.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -1])
