"""What a scheduling policy buys at a given concurrency: many requests walk real rounds, one shared verifier step a time.

The model
---------
* A request is a document of a replayed slot table. It stands on an anchor; the table gives, for that anchor, the chance
  r_k that draft k is kept given that its predecessors were, and the confidence at every position.
* One step: every request drafts N tokens, a policy chooses how many of each to verify (`lengths`), and the verifier
  takes B = R + sum(lengths) tokens at once. The step lasts `costs.step_ms(B, R)`: draft for R requests, verify B tokens.
* The number of kept drafts is drawn from r (one uniform a request and step), cut at `lengths`; the request emits one
  token more and moves to the anchor after it, or to the next anchor that the table has.
* A finished request is replaced at once by another document, drawn uniformly from the prompts of the mix. Requests start
  on anchors drawn by how often rounds visit them, so that they do not march in step; `warmup` steps are not counted.
* Drafts beyond the end of a text do not exist here: they are neither verified nor counted as waste.
* Prefill, sampling and scheduling cost nothing. Confidences after a lost draft are those of the text (see
  `dspark.calibration`). Fewer verified drafts do not make drafting cheaper.

Servers run in lockstep: K replicas of G servers of R requests. Each replica has its own bootstrap sample of prompts, so the
spread over replicas covers the prompts (and what is left of the draws). All policies see the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.optimize import brentq

from dspark import scheduler
from dspark.calibration import Rounds
from dspark.costs import CostTable

Array = np.ndarray
STALE_STEPS = 2
ARRIVALS = 1024  # documents drawn ahead for a server; used again from the start if they run out


@dataclass(frozen=True)
class Walk:
    """A replayed table made ready to walk. M rounds, N proposals.

    kept         [M, N] probability that drafts 1..k are all accepted (0 past the end of the text)
    available    [M] drafts that exist
    remaining    [M] tokens of the text after the anchor
    next_round   [M, N+1] row reached after m accepted drafts, -1 when the text is finished
    first        [D] row of each document's first round; `prompt`, `domain` [D]; `document` [M] its index; `visit` [M]
    """

    kept: Array
    available: Array
    remaining: Array
    next_round: Array
    first: Array
    prompt: Array
    domain: Array
    document: Array
    visit: Array

    @property
    def num_proposals(self) -> int:
        return self.kept.shape[1]


def walk_of(rounds: Rounds) -> tuple[Walk, Array]:
    """`Walk` of a replayed table, and the order [M] in which it holds the rounds of `rounds`.

    Raises ValueError for decoded tables: they know only the anchors that one policy visited.
    """
    present = rounds.present
    r = rounds.values["r"]
    modes = sorted(set(rounds.frame["mode"]))
    if modes != ["replay"]:
        raise ValueError(
            f"the slot table was written with mode {modes}; the simulator walks replayed tables, which hold every anchor. "
            "Evaluate with mode=replay."
        )
    document, _ = pd.factorize(
        pd.MultiIndex.from_frame(rounds.frame[["run_id", "dataset", "prompt_id", "doc_id", "temperature"]])
    )
    anchor = rounds.frame["anchor"].to_numpy()
    order = np.lexsort((anchor, document))
    document, anchor, present, r = document[order], anchor[order], present[order], r[order]
    available = np.logical_and.accumulate(present, axis=1).sum(1)
    ends = np.zeros(document.max() + 1, dtype=np.int64)
    np.maximum.at(ends, document, anchor + available)
    remaining = ends[document] - anchor
    span = int(anchor.max() + rounds.num_proposals + 3)
    place = document.astype(np.int64) * span + anchor
    wanted = anchor[:, None] + 1 + np.arange(rounds.num_proposals + 1)
    found = np.searchsorted(place, document[:, None].astype(np.int64) * span + wanted)
    same = (found < len(place)) & (document[np.minimum(found, len(place) - 1)] == document[:, None])
    first = np.flatnonzero(np.r_[True, document[1:] != document[:-1]])
    frame = rounds.frame.iloc[order]
    walk = Walk(
        kept=np.cumprod(np.where(present, np.nan_to_num(r), 0.0), axis=1).astype(np.float32),
        available=available.astype(np.int32),
        remaining=np.maximum(remaining, 1).astype(np.int32),
        next_round=np.where(same, found, -1).astype(np.int32),
        first=first,
        prompt=frame["prompt_id"].to_numpy()[first],
        domain=frame["domain"].to_numpy()[first],
        document=document,
        visit=frame["visit"].to_numpy(),
    )
    return walk, order


@dataclass(frozen=True)
class Policy:
    """How lengths are chosen. `kind` is one of KINDS; `source` names the score table, `setting` the number it needs.

    none                no speculation: one token a request and step, no drafting cost
    fixed               `setting` drafts of every request
    threshold           drafts up to the first whose score falls below `setting` (score: p_accept_given_prefix)
    scheduler           Algorithm 1 with early stop (score: p_prefix_survives)
    scheduler_global    the same without the early stop: not lossless on jagged curves
    scheduler_async     number from the confidences of two steps before, global search; order from current ones
    oracle              knows which drafts will be kept: an upper bound, not lossless
    """

    kind: str
    source: str
    setting: float

    KINDS = ("none", "fixed", "threshold", "scheduler", "scheduler_global", "scheduler_async", "oracle")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"policy {self.kind!r} is unknown; expected one of {self.KINDS}.")

    @property
    def is_static(self) -> bool:
        return self.kind in ("none", "fixed", "threshold")


@dataclass(frozen=True)
class Lanes:
    """Who runs where. `starts` [K*G, R] initial rows; `arrivals` [K*G, P] first rows of documents in order of arrival.

    The G servers of one replica lie next to each other and draw from the same sample of prompts.
    """

    starts: Array
    arrivals: Array
    servers: int


def lanes_of(
    walk: Walk,
    *,
    mix: str,
    requests: int,
    replicas: int,
    servers: int,
    resample: bool,
    rng: np.random.Generator,
) -> Lanes:
    """Draw documents of domain `mix` (or `all`) for `replicas` x `servers` x `requests` requests.

    With `resample` each replica sees its own bootstrap sample of prompts. Raises ValueError for a domain without documents.
    """
    documents = np.flatnonzero((walk.domain == mix) | (mix == "all"))
    if not len(documents):
        raise ValueError(
            f"domain mix {mix!r} has no documents; the table has {sorted(set(walk.domain))} and 'all'."
        )
    prompts, prompt_of = np.unique(walk.prompt[documents], return_inverse=True)
    share = 1 / np.bincount(prompt_of)[prompt_of]
    if not walk.visit[np.isin(walk.document, documents)].sum() > 0:
        raise ValueError(f"no round of domain mix {mix!r} has a positive visit; the table is not a replay.")
    starts, arrivals = [], []
    for _ in range(replicas):
        times = (
            np.bincount(rng.integers(len(prompts), size=len(prompts)), minlength=len(prompts))
            if resample
            else np.ones(len(prompts))
        )
        weight = times[prompt_of] * share
        per_document = np.zeros(len(walk.first))
        per_document[documents] = weight
        by_round = np.cumsum(walk.visit * per_document[walk.document])
        rows = np.searchsorted(by_round, rng.random((servers, requests)) * by_round[-1], side="right")
        starts.append(np.minimum(rows, len(by_round) - 1))
        arrivals.append(walk.first[rng.choice(documents, size=(servers, ARRIVALS), p=weight / weight.sum())])
    return Lanes(np.concatenate(starts), np.concatenate(arrivals), servers)


@dataclass(frozen=True)
class Totals:
    """Sums over the counted steps and a replica's servers, one entry a replica; `beyond` counts extrapolated steps."""

    emitted: Array
    verified: Array
    accepted: Array
    seconds: Array
    beyond: Array
    server_steps: int
    requests: int

    @property
    def throughput(self) -> Float[Array, " K"]:
        """Tokens a second of one server, over all its requests."""
        return self.emitted / self.seconds


def run(
    walk: Walk,
    policy: Policy,
    *,
    score: Float[Array, "M N"] | None,
    costs: CostTable,
    lanes: Lanes,
    steps: int,
    warmup: int,
    seed: int,
) -> Totals:
    """Walk `lanes` for `warmup` + `steps` verifier steps under one policy. `score` is what `policy.kind` asks for."""
    count, requests = lanes.starts.shape
    width = walk.num_proposals
    most = requests * (width + 1)
    sps = costs.sps(requests=requests, max_tokens=most)
    if policy.kind == "none":
        sps = np.concatenate([[0.0], 1000 / costs.verify_ms_at(np.arange(1, most + 1))])
    step_seconds = np.divide(1.0, sps, out=np.zeros_like(sps), where=sps > 0)
    choose = _chooser(policy, sps, width)
    score32 = None if score is None else np.nan_to_num(score).astype(np.float32)
    rng = np.random.default_rng(seed)
    row, lane = lanes.starts.copy(), np.arange(count)[:, None]
    served = np.zeros(count, dtype=np.int64)
    emitted, verified, accepted, seconds, beyond = sums = np.zeros((5, count))
    for step in range(warmup + steps):
        kept = np.count_nonzero(rng.random((count, requests, 1), dtype=np.float32) < walk.kept[row], axis=-1)
        lengths = choose(None if score32 is None else score32[row], walk.available[row], kept)
        m = np.minimum(kept, lengths)
        if step >= warmup:
            tokens = requests + lengths.sum(1)
            emitted += np.minimum(m + 1, walk.remaining[row]).sum(1)
            verified += tokens - requests
            accepted += m.sum(1)
            seconds += step_seconds[tokens]
            beyond += costs.is_extrapolated(tokens)
        row = walk.next_round[row, m]
        done = row < 0
        if done.any():
            turn = (served[:, None] + np.cumsum(done, axis=1) - 1) % lanes.arrivals.shape[1]
            row = np.where(done, lanes.arrivals[lane, turn], row)
            served += done.sum(1)
    by_replica = sums.reshape(5, -1, lanes.servers).sum(-1)
    return Totals(*by_replica, server_steps=steps * lanes.servers, requests=requests)


def _chooser(policy: Policy, sps: Array, width: int) -> Callable[[Array | None, Array, Array], Array]:
    """lengths [K, R] from (score [K, R, N], available [K, R], kept drafts [K, R])."""
    if policy.kind == "none":
        return lambda score, available, kept: np.zeros_like(kept)
    if policy.kind == "fixed":
        return lambda score, available, kept: scheduler.fixed_length(available, int(policy.setting))
    if policy.kind == "threshold":
        return lambda score, available, kept: np.minimum(
            available, scheduler.static_threshold(score, policy.setting)
        )
    if policy.kind == "oracle":
        return lambda score, available, kept: scheduler.oracle(
            np.arange(1, width + 1) <= kept[..., None], sps
        )
    if policy.kind in ("scheduler", "scheduler_global"):
        return lambda score, available, kept: scheduler.admit(
            score, sps, early_stop=policy.kind == "scheduler"
        )
    numbers: list[Array] = []

    def asynchronous(score: Array, available: Array, kept: Array) -> Array:
        numbers.append(scheduler.best_number(score, sps, early_stop=False))
        return scheduler.admit_number(score, numbers[0] if len(numbers) <= STALE_STEPS else numbers.pop(0))

    return asynchronous


def compare(
    walk: Walk,
    policies: Sequence[Policy],
    scores: Mapping[str, Float[Array, "M N"]],
    *,
    prefix_scores: Mapping[str, Float[Array, "M N"]],
    costs: CostTable,
    mix: str,
    requests: int,
    replicas: int,
    servers: int,
    steps: int,
    warmup: int,
    resample: bool,
    seed: int,
) -> pd.DataFrame:
    """One row a policy at one concurrency and mix. `scores` are p_accept_given_prefix, `prefix_scores` survive.

    throughput (tokens/s, all requests), low, high (95 %, normal, from the spread over replicas), tokens_per_second_per_user,
    tau, verified_drafts and wasted_drafts (a round), wasted_share (of verified drafts), step_ms, speed_up (over `none`),
    gain (over the best static policy of the row's mix and concurrency, paired by replica, with gain_low, gain_high),
    extrapolated (share of steps beyond the cost table), rounds. A static policy is none, fixed or threshold.
    """
    rng = np.random.default_rng(seed)
    lanes = lanes_of(
        walk, mix=mix, requests=requests, replicas=replicas, servers=servers, resample=resample, rng=rng
    )
    totals = {
        policy: run(
            walk,
            policy,
            score=_score_of(policy, scores, prefix_scores),
            costs=costs,
            lanes=lanes,
            steps=steps,
            warmup=warmup,
            seed=seed,
        )
        for policy in policies
    }
    plain = requests * 1000.0 / float(costs.verify_ms_at(np.array(requests)))
    static = [p for p in policies if p.is_static]
    best = max(static, key=lambda p: totals[p].emitted.sum() / totals[p].seconds.sum(), default=None)
    rows = []
    for policy, t in totals.items():
        throughput, spread = t.emitted.sum() / t.seconds.sum(), _half_width(t.throughput)
        ratio = t.throughput / totals[best].throughput if best else np.full(replicas, np.nan)
        count = t.server_steps * t.requests * replicas
        verified, accepted = t.verified.sum(), t.accepted.sum()
        rows.append(
            {
                "cost": costs.name,
                "mix": mix,
                "concurrency": requests,
                "policy": policy.kind,
                "source": policy.source,
                "setting": policy.setting,
                "throughput": throughput,
                "low": throughput - spread,
                "high": throughput + spread,
                "tokens_per_second_per_user": throughput / requests,
                "tau": t.emitted.sum() / count,
                "verified_drafts": verified / count,
                "wasted_drafts": (verified - accepted) / count,
                "wasted_share": (verified - accepted) / verified if verified else 0.0,
                "step_ms": 1000 * t.seconds.sum() / (t.server_steps * replicas),
                "speed_up": throughput / plain,
                "gain": float(ratio.mean()) - 1,
                "gain_low": float(ratio.mean()) - 1 - _half_width(ratio),
                "gain_high": float(ratio.mean()) - 1 + _half_width(ratio),
                "extrapolated": float(t.beyond.mean() / t.server_steps),
                "rounds": count,
            }
        )
    return pd.DataFrame(rows)


def _score_of(
    policy: Policy, scores: Mapping[str, Array], prefix_scores: Mapping[str, Array]
) -> Array | None:
    if policy.kind in ("none", "fixed", "oracle"):
        return None
    table = scores if policy.kind == "threshold" else prefix_scores
    if policy.source not in table:
        raise ValueError(
            f"policy {policy.kind} wants confidences {policy.source!r}; this table offers {sorted(table)}."
        )
    return table[policy.source]


def _half_width(values: Float[Array, " K"]) -> float:
    """1.96 standard deviations over replicas; each replica is one bootstrap sample, so no division by sqrt(K)."""
    return 1.96 * float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def break_even(walk: Walk, costs: CostTable, *, mix: str, requests: int) -> pd.DataFrame:
    """Does speculation pay at this concurrency, and with how many drafts? One row a block length n = 0..N.

    cost_ratio              step time with n drafts over a plain step = the tau at which speculation breaks even
    break_even_acceptance   the constant conditional acceptance that gives this tau; NaN if even 1.0 does not
    tau                     expected tokens a round with n drafts, rounds weighted by their visits
    speed_up                tau / cost_ratio (1 at n = 0, which needs no draft)
    best                    the n with the largest speed_up; n = 0 there means: no speed-up from a fixed length
    """
    weight = walk.visit * ((walk.domain == mix) | (mix == "all"))[walk.document]
    if not weight.sum() > 0:
        raise ValueError(
            f"domain mix {mix!r} has no rounds; the table has {sorted(set(walk.domain))} and 'all'."
        )
    survival = (weight[:, None] * walk.kept).sum(0) / weight.sum()
    plain = float(costs.verify_ms_at(np.array(requests)))
    rows = []
    for n in range(walk.num_proposals + 1):
        ratio = 1.0 if n == 0 else float(costs.step_ms(np.array(requests * (n + 1)), requests)) / plain
        tau = 1.0 + float(survival[:n].sum())
        rows.append(
            {
                "cost": costs.name,
                "mix": mix,
                "concurrency": requests,
                "drafts": n,
                "cost_ratio": ratio,
                "break_even_acceptance": break_even_acceptance(ratio, n),
                "tau": tau,
                "speed_up": tau / ratio,
                "extrapolated": bool(costs.is_extrapolated(np.array(requests * (n + 1)))),
            }
        )
    table = pd.DataFrame(rows)
    return table.assign(best=table["speed_up"] == table["speed_up"].max())


def break_even_acceptance(cost_ratio: float, drafts: int) -> float:
    """The acceptance a for which 1 + a + ... + a^n equals `cost_ratio`; 0 if it costs nothing, NaN if a > 1 were needed."""
    if drafts == 0 or cost_ratio <= 1:
        return 0.0
    if cost_ratio > drafts + 1:
        return float("nan")
    powers = np.arange(drafts + 1)
    return float(brentq(lambda a: (a**powers).sum() - cost_ratio, 0.0, 1.0))


def threshold_sweep(rounds: Rounds, score: Float[Array, "M N"], thresholds: Sequence[float]) -> pd.DataFrame:
    """Paper fig. 5: what a static threshold on p_accept_given_prefix keeps and what it loses, by domain and over all.

    acceptance_rate = accepted / verified drafts; verified and accepted are means a round, tau = 1 + accepted. Rounds are
    weighted by their visits under full-length verification.
    """
    rows = []
    score = np.where(rounds.present, np.nan_to_num(score), -1.0)
    survives = rounds.survives
    domain_of, visit = rounds.frame["domain"].to_numpy(), rounds.frame["visit"].to_numpy()
    for threshold in thresholds:
        lengths = scheduler.static_threshold(score, float(threshold))
        accepted = np.where(np.arange(score.shape[1]) < lengths[:, None], survives, 0.0).sum(1)
        for domain in ["all", *sorted(set(domain_of))]:
            w = visit * ((domain_of == domain) | (domain == "all"))
            verified_mean, accepted_mean = (
                float((w * lengths).sum() / w.sum()),
                float((w * accepted).sum() / w.sum()),
            )
            rows.append(
                {
                    "threshold": float(threshold),
                    "domain": domain,
                    "verified": verified_mean,
                    "accepted": accepted_mean,
                    "tau": 1 + accepted_mean,
                    "acceptance_rate": accepted_mean / verified_mean if verified_mean > 0 else float("nan"),
                    "rounds": float(w.sum()),
                }
            )
    return pd.DataFrame(rows)
