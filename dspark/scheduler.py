"""How many drafted tokens of each request to verify: the hardware-aware prefix scheduler and its simpler rivals.

Shapes: R requests in one verifier step, N proposals each; leading batch axes are independent steps. Every policy
returns `lengths [..., R]`: request r has its first `lengths[r]` drafts verified (always a prefix), beside the one token
that every request verifies anyway. `survival[..., r, k]` is p_prefix_survives, `sps[B]` the steps a second when B
tokens are verified together (index 0 is unused). A slot with survival 0 is never admitted.

Lossless means that the decision to verify draft k may not depend on draft k itself or on later ones: what is thrown
away unverified must not say anything about the token. `admit` with `early_stop`, `admit_number` with a number that is
older than the drafts, `static_threshold` and `fixed_length` keep to that. `admit` without `early_stop` and `oracle` do
not (paper, Appendix A); they are here to be compared with.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

Array = np.ndarray


def admit(
    survival: Float[Array, "*batch R N"], sps: Float[Array, " B"], *, early_stop: bool
) -> Int[Array, "*batch R"]:
    """Paper Algorithm 1: admit drafts in order of survival while expected tokens a second rise.

        Theta(n) = (R + sum of the n largest survivals) * SPS(R + n)

    With `early_stop` the first draft that does not raise Theta ends the search; a draft is then admitted on the
    strength of itself and of likelier drafts alone. Without it the global maximum is taken, which is *not* lossless
    unless Theta has a single peak (it has whenever seconds per step are convex in B).
    """
    order = _descending(survival)
    return _first(
        survival, order, _best_number(order, sps, requests=survival.shape[-2], early_stop=early_stop)
    )


def best_number(
    survival: Float[Array, "*batch R N"], sps: Float[Array, " B"], *, early_stop: bool
) -> Int[Array, "*batch"]:
    """How many drafts Algorithm 1 admits in all; see `admit`.

    Raises ValueError if `sps` does not reach R * (N + 1) tokens.
    """
    return _best_number(_descending(survival), sps, requests=survival.shape[-2], early_stop=early_stop)


def admit_number(
    survival: Float[Array, "*batch R N"], number: Int[Array, "*batch"]
) -> Int[Array, "*batch R"]:
    """Admit the `number` likeliest drafts with survival above 0 (fewer if there are fewer), prefixes first.

    The asynchronous scheduler: `number` comes from `best_number` of two steps before, where the global search is
    allowed because a number that old cannot depend on the current drafts; the order is the current one.
    Ties go to the earlier position, then to the earlier request, so that no later confidence decides about a draft.
    """
    return _first(survival, _descending(survival), number)


def _descending(survival: Float[Array, "*batch R N"]) -> Float[Array, "*batch RN"]:
    order = np.negative(survival).reshape(*survival.shape[:-2], -1)
    order.sort(axis=-1)
    return np.negative(order, out=order)


def _best_number(
    order: Float[Array, "*batch RN"], sps: Float[Array, " B"], *, requests: int, early_stop: bool
) -> Array:
    last = requests + order.shape[-1]
    if len(sps) <= last:
        raise ValueError(
            f"sps covers up to {len(sps) - 1} tokens; {requests} requests and {order.shape[-1]} drafts need {last}."
        )
    theta = np.empty((*order.shape[:-1], order.shape[-1] + 1), dtype=order.dtype)
    theta[..., 0] = requests
    np.cumsum(order, axis=-1, out=theta[..., 1:])
    theta[..., 1:] += requests
    theta *= sps[requests : last + 1].astype(order.dtype)
    possible = np.count_nonzero(order > 0, axis=-1)
    if not early_stop:
        beyond = np.arange(theta.shape[-1]) > possible[..., None]
        return np.asarray(np.argmax(np.where(beyond, -np.inf, theta), axis=-1))
    stops = theta[..., 1:] <= theta[..., :-1]
    first = np.argmax(stops, axis=-1)
    return np.asarray(np.minimum(np.where(stops.any(axis=-1), first, order.shape[-1]), possible))


def _first(survival: Float[Array, "*batch R N"], order: Float[Array, "*batch RN"], number: Array) -> Array:
    number = np.minimum(number, np.count_nonzero(order > 0, axis=-1))
    last = np.take_along_axis(order, np.maximum(number - 1, 0)[..., None], axis=-1)[..., None]
    last = np.where(number[..., None, None] > 0, last, np.inf)
    lengths = np.count_nonzero(survival >= last, axis=-1)
    surplus = lengths.sum(axis=-1) - number
    if surplus.any():
        tied = np.swapaxes(survival == last, -1, -2).reshape(order.shape)  # position-major: the tie order
        drop = tied & (np.cumsum(tied[..., ::-1], axis=-1)[..., ::-1] <= surplus[..., None])
        lengths = lengths - np.count_nonzero(drop.reshape(*order.shape[:-1], survival.shape[-1], -1), axis=-2)
    return lengths


def static_threshold(score: Float[Array, "*batch N"], threshold: float) -> Int[Array, "*batch"]:
    """Verify up to the first draft whose score is below `threshold`. The score is either probability, by choice."""
    return np.count_nonzero(np.logical_and.accumulate(score >= threshold, axis=-1), axis=-1)


def fixed_length(available: Int[Array, "*batch"], length: int) -> Int[Array, "*batch"]:
    """Verify `length` drafts of every request, or as many as it has."""
    return np.minimum(available, length)


def oracle(kept: Bool[Array, "*batch R N"], sps: Float[Array, " B"]) -> Int[Array, "*batch R"]:
    """The best lengths for one who knows the outcome: `kept[..., k]` says that drafts 1..k will all be accepted.

    An upper bound for any scheduler on this step, unattainable without changing the output's distribution.
    """
    return admit(kept.astype(np.float32), sps, early_stop=False)
