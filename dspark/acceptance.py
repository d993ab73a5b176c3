"""How many tokens a round emits: survival, tau, conditional acceptance, and the exact replay of rounds along a text.

One set of definitions for training, evaluation and figures. `accepted` counts kept drafts that lie inside the text; tau is
1 + accepted / rounds, so it includes the bonus token, as vLLM's mean acceptance length does. (The last round of a text may
emit no bonus; emitted / rounds is therefore smaller than tau, by less than one token a text.)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor


def survival(keep: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
    """P(accepted >= i | anchor) for i = 1..N, the running product of conditional keep probabilities."""
    return keep.cumprod(-1)


def expected_accepted(keep: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch"]:
    """Mean number of kept drafts of a round that starts at the anchor; the bonus token is not counted."""
    return survival(keep).sum(-1)


def accepted_distribution(keep: np.ndarray) -> np.ndarray:
    """P(m drafts are kept), m = 0..N, from conditional keep probabilities [..., N]; float64 [..., N+1]."""
    alive = np.cumprod(np.asarray(keep, dtype=np.float64), axis=-1)
    alive = np.concatenate([np.ones_like(alive[..., :1]), alive], axis=-1)
    lost = np.concatenate([alive[..., 1:], np.zeros_like(alive[..., :1])], axis=-1)
    return alive - lost


def replay_visits(keep: np.ndarray) -> np.ndarray:
    """Expected number of rounds that start at each anchor of one document's response, float64 [A].

    `keep[a, i]` is the chance that proposal i+1 of the a-th anchor is kept given that the round reached it; anchors are
    consecutive tokens, and a proposal beyond the text has keep 0. A round at `a` that keeps m drafts emits m + 1 tokens, so the
    next starts at `a + m + 1`: visit[first] = 1, visit[a + m + 1] += visit[a] P(m | a).
    """
    count, width = keep.shape
    moves = accepted_distribution(keep)
    visits = np.zeros(count + width + 1)
    visits[0] = 1.0
    for a in range(count):
        if visits[a] > 0.0:
            visits[a + 1 : a + width + 2] += visits[a] * moves[a]
    return visits[:count]


def replay_counts(keep: np.ndarray) -> tuple[float, float]:
    """(accepted drafts, verification rounds) expected over one document; add both over documents, then `tau_from_counts`."""
    visits = replay_visits(keep)
    return float((visits * np.cumprod(keep, axis=-1, dtype=np.float64).sum(-1)).sum()), float(visits.sum())


def conditional_acceptance(reached: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """P(proposal i kept | proposals before it kept), [N]; nan where no round reached the proposal.

    `reached` and `accepted` are [rounds, N] weights: 0/1 counts from decoding, or visit-weighted probabilities from replay.
    """
    total = reached.sum(0)
    return np.divide(accepted.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)


def tau_from_counts(accepted: float, rounds: float) -> float:
    """Tokens a round emits, bonus included: 1 + accepted / rounds.

    Raises ValueError without a single round, for which no tau exists.
    """
    if rounds <= 0:
        raise ValueError("tau of zero verification rounds is undefined; were any tokens generated?")
    return 1.0 + accepted / rounds
