"""Training losses over the draft vocabulary, without ever holding a [rows, V] tensor for all rows.

For one supervised proposal, p is the verifier's distribution (restricted to the draft vocabulary, normalised over the whole
verifier vocabulary unless `target_norm: draft_vocab`) and q the draft's softmax. alpha = sum_v min(p_v, q_v) is the chance
that rejection sampling keeps a draft drawn from q (paper eq. 8).

| name         | value                                             | range      |
|--------------|---------------------------------------------------|------------|
| ce           | -log q[label]; label is the text or argmax p      | [0, inf)   |
| tv           | 1 - alpha                                         | [0, 1]     |
| l1           | 2 (1 - alpha), the norm of paper eq. 10           | [0, 2]     |
| kl           | sum p log(p/q), over the draft vocabulary         |            |
| rkl          | sum q log(q/p)                                    |            |
| jsd          | Jensen-Shannon divergence with m = (p + q) / 2    | [0, log 2] |
| nla          | -log alpha                                        | [0, inf)   |
| lk_hybrid    | w kl + (1 - w) tv, w = exp(-3 alpha) held constant (arXiv 2602.23881) | |

Softmaxes and every term run in fp32. Each term supplies its value and its gradient with respect to the draft logits, so a
chunk of rows is finished, gradient included, before the next one is touched. `plain_terms` is the same arithmetic as an
ordinary autograd graph: the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.kernels import triton_is_installed

TERMS = ("ce", "tv", "l1", "kl", "rkl", "jsd", "nla", "lk_hybrid")
KERNEL_TERMS = ("ce", "tv", "l1", "kl", "nla", "lk_hybrid")  # their gradients need no logarithm per token
TARGET_NORMS = ("verifier_vocab", "draft_vocab")
CE_LABELS = ("text", "target_top1")
LK_ETA = 3.0
ROW_STEP = 64  # rows of a product with the head come in multiples of this
FEW_PARTS = 4  # so many parts' gradients of a bf16 matrix add up in bf16: no more roundings than in a sum of fp32 casts
CPU_BLOCK_BYTES = 2 << 20  # of fp32 logits; about one core's second-level cache
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What is optimised: `terms` maps names of the table above to weights; `confidence` weighs the BCE of paper eq. 11."""

    terms: Mapping[str, float]
    confidence: float
    decay_gamma: float | None
    ce_label: str
    target_norm: str

    def __post_init__(self) -> None:
        unknown = sorted(set(self.terms) - set(TERMS))
        if unknown:
            raise ValueError(f"loss.terms has unknown names {unknown}; expected names out of {TERMS}.")
        if not any(self.terms.values()):
            raise ValueError(
                f"loss.terms are {dict(self.terms)}: nothing to train. Give at least one of {TERMS} a weight."
            )
        if self.ce_label not in CE_LABELS:
            raise ValueError(f"loss.ce_label is {self.ce_label!r}; expected one of {CE_LABELS}.")
        if self.target_norm not in TARGET_NORMS:
            raise ValueError(f"loss.target_norm is {self.target_norm!r}; expected one of {TARGET_NORMS}.")
        if self.decay_gamma is not None and not self.decay_gamma > 0:
            raise ValueError(
                f"loss.decay_gamma is {self.decay_gamma}; expected a positive number of slots, or null for none."
            )


@dataclass
class Rows:
    """Supervised proposals, flattened to `M` rows, and the verifier states they are compared with.

    `target` holds one state per distinct position (`P` of them); `target_row[m]` picks the one of row m, ascending within
    a document. `labels` are text tokens as draft ids, -1 where the draft vocabulary lacks the token. `weights` are zero for
    proposals that are not supervised.
    """

    features: Float[Tensor, "M H"]
    bias_features: Float[Tensor, "M R"] | None
    weights: Float[Tensor, " M"]
    labels: Int[Tensor, " M"]
    target_row: Int[Tensor, " M"]
    target: Float[Tensor, "P H"]
    target_lse: Float[Tensor, " P"]


@dataclass
class RowStats:
    """Per-row facts that metrics and the confidence label need; all detached."""

    alpha: Float[Tensor, " M"]
    label_keep: Float[Tensor, " M"]
    greedy_hit: Float[Tensor, " M"]
    loss: Float[Tensor, " M"]


@dataclass
class Part:
    """Some rows that are finished together. `target_row[m]` picks the row's verifier state among `positions`."""

    keep: Int[Tensor, " m"]
    positions: Int[Tensor, " p"]
    target_row: Int[Tensor, " m"]


class VocabularyLoss(torch.autograd.Function):
    """Weighted sum of loss terms over rows; the gradient is formed with the value, part by part."""

    @staticmethod
    def forward(
        ctx,
        features,
        bias_features,
        bias_weight,
        joint,
        rows,
        weights,
        logit_scale,
        parts,
        need_grad,
    ):
        dtype, hidden = features.dtype, features.shape[1]
        head_weight = joint[:, :hidden]
        inputs = features if bias_features is None else torch.cat([features, bias_features.to(dtype)], dim=1)
        active = sum(len(part.keep) for part in parts)
        # Results in the order of the parts, behind a row of zeros for all rows that are in none.
        stats = inputs.new_zeros(4, 1 + active, dtype=torch.float32)
        grads = inputs.new_empty(1 + active, inputs.shape[1]) if need_grad else None
        grad_bias, start = None, 1
        few = bias_weight is not None and bias_weight.dtype == dtype and len(parts) <= FEW_PARTS
        kind = dtype if few else torch.float32
        for part in parts:
            stop = start + len(part.keep)
            states = rows.target[part.positions].to(dtype)
            chunk = inputs[part.keep]
            logits = chunk @ joint.T  # base logits and bias in one product
            stats[:, start:stop] = _chunk(
                logits,
                states,
                rows.target_lse[part.positions],
                part.target_row,
                rows.labels[part.keep],
                rows.weights[part.keep] if need_grad else None,
                head_weight,
                weights,
                logit_scale,
            )
            if need_grad:
                torch.mm(logits, joint, out=grads[start:stop])
                if bias_weight is not None:
                    factors = logits.T, chunk[:, hidden:]
                    if grad_bias is None:
                        grad_bias = torch.mm(*factors).to(kind)
                    elif few:
                        grad_bias.addmm_(*factors)
                    else:
                        grad_bias.add_(torch.mm(*factors))
            start = stop
            del logits  # two parts' are never held at once
        place = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        if parts:
            place[torch.cat([part.keep for part in parts])] = torch.arange(1, 1 + active, device=place.device)
        stats = RowStats(*stats[:, place])
        total = (stats.loss * rows.weights).sum()
        grad_inputs = None
        if need_grad:
            grads[0].zero_()
            grad_inputs = grads[place]
            if bias_weight is not None:
                grad_bias = (
                    torch.zeros_like(bias_weight) if grad_bias is None else grad_bias.to(bias_weight.dtype)
                )
        ctx.hidden = hidden
        ctx.save_for_backward(grad_inputs, grad_bias)
        ctx.mark_non_differentiable(*vars(stats).values())
        return total, *vars(stats).values()

    @staticmethod
    def backward(ctx, grad_total, *_):
        grad_inputs, grad_bias = ctx.saved_tensors
        grad_inputs = _times(grad_inputs, grad_total)
        grad_features, grad_bias_features = grad_inputs[:, : ctx.hidden], None
        if grad_bias is not None:
            grad_bias_features, grad_bias = grad_inputs[:, ctx.hidden :], _times(grad_bias, grad_total)
        return grad_features, grad_bias_features, grad_bias, *[None] * 6


def _times(x: Tensor, factor: Float[Tensor, ""]) -> Tensor:
    """`x * factor`; the ordinary product with a number that a CUDA device holds takes four times as long."""
    return torch._foreach_mul([x], factor.to(x.dtype))[0]


@dataclass(frozen=True)
class PartSizes:
    """How many rows all parts have together, and how many target positions each."""

    rows: int
    positions: tuple[int, ...]

    def hold(self, other: PartSizes) -> bool:
        """Whether parts of these sizes have room for what `other` counts."""
        pairs = zip(self.positions, other.positions, strict=True)
        return self.rows >= other.rows and all(mine >= theirs for mine, theirs in pairs)

    def grown(self, other: PartSizes, step: int) -> PartSizes:
        """The larger of both, each number rounded up to a multiple of `step`."""
        pairs = zip(self.positions, other.positions, strict=True)
        rows, *positions = (_whole_steps(max(pair), step) for pair in ((self.rows, other.rows), *pairs))
        return PartSizes(rows, tuple(positions))


class PartPlan:
    """The supervised rows, ascending, up to `chunk_rows` in a part, each with its distinct target positions.

    Numbers of rows and positions are rounded up to `ROW_STEP` with others, which have no weight: products are compiled for
    their shape on a CPU, and numbers differ from step to step. The host needs them (`sizes`): whoever makes a plan and calls
    `send` before queueing other work, and asks after, does not wait for that work.
    """

    def __init__(
        self,
        supervised: Bool[Tensor, " M"],
        target_row: Int[Tensor, " M"],
        positions: int,
        chunk_rows: int,
    ) -> None:
        """`target_row` picks every row's verifier state among `positions`."""
        count, device = len(supervised), supervised.device
        self._target_row, self._positions, self._chunk_rows = target_row, positions, chunk_rows
        self._order = torch.argsort((~supervised).to(torch.uint8), stable=True)
        parts = -(-count // chunk_rows)
        # Which positions each part needs; idle rows ask for one beyond the last.
        place = target_row.masked_fill(~supervised, positions)[self._order]
        place = place + torch.arange(count, device=device) // chunk_rows * (positions + 1)
        seen = torch.zeros(parts * (positions + 1), dtype=torch.bool, device=device)
        seen = seen.scatter_(0, place, True).view(parts, -1)[:, :-1]
        self._needed = torch.argsort((~seen).to(torch.uint8), dim=1, stable=True)
        self._local = seen.cumsum(1).sub_(1).clamp_(min=0)
        self.numbers = torch.cat(
            [supervised.sum().view(1), seen.sum(1)]
        )  # of rows, and of each part's positions
        self._host: Tensor | None = None

    def send(self) -> PartPlan:
        """Queue the numbers' copy to the host. Returns the plan."""
        if self._host is None:
            self._host, self._arrived = self.numbers.to("cpu", non_blocking=True), None
            if self.numbers.is_cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        return self

    def sizes(self) -> PartSizes:
        """What the parts need; waits for it."""
        self.send()
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.sizes_of(self._host)

    def sizes_of(self, numbers: Int[Tensor, " N"]) -> PartSizes:
        """What the parts of a plan with these `numbers`, on the host, would need, if it was made of as many rows and positions."""
        total, *distinct = numbers.tolist()
        return PartSizes(
            min(_whole_steps(total, ROW_STEP), len(self._order)),
            tuple(min(_whole_steps(max(1, number), ROW_STEP), self._positions) for number in distinct),
        )

    def parts(self, sizes: PartSizes | None = None) -> list[Part]:
        """The parts, filled up with idle rows and positions to `sizes`, by default those of `self.sizes()`.

        In sizes that do not hold these, rows are missing or get another's position: nothing that the loss may be taken from.
        """
        sizes = sizes or self.sizes()
        active = min(sizes.rows, len(self._order))
        parts = []
        for i, start in enumerate(range(0, active, self._chunk_rows)):
            keep = self._order[start : min(start + self._chunk_rows, active)]
            positions = self._needed[i, : sizes.positions[i]]
            target_row = self._local[i, self._target_row[keep]].clamp_(max=len(positions) - 1)
            parts.append(Part(keep, positions, target_row))
        return parts


def _whole_steps(count: int, step: int) -> int:
    return -(-count // step) * step


def _chunk(
    logits: Float[Tensor, "M V"],
    states: Float[Tensor, "P H"],
    lse: Float[Tensor, " P"],
    target_row: Int[Tensor, " M"],
    labels: Int[Tensor, " M"],
    row_weights: Float[Tensor, " M"] | None,
    head_weight: Float[Tensor, "V H"],
    weights: LossWeights,
    logit_scale: float,
) -> Float[Tensor, "4 M"]:
    """`RowStats` fields of one chunk; with `row_weights`, the gradient takes the place of `logits`.

    Where there is a kernel, it does everything after the two products.
    """
    if _has_kernel(logits.device, weights):
        from dspark.kernels.loss import loss_terms

        return loss_terms(
            logits,
            states @ head_weight.to(states.dtype).T,
            target_row,
            lse,
            labels,
            row_weights,
            terms=weights.terms,
            text_label=weights.ce_label == "text",
            renormalise=weights.target_norm == "draft_vocab",
            scale=logit_scale,
            lk_eta=LK_ETA,
        )
    target = target_probabilities(states, lse, head_weight, logit_scale, weights.target_norm)
    ce_labels = labels if weights.ce_label == "text" else maximum_and_index(target)[1][target_row]
    finished = []
    # Large products, small element-wise blocks: the latter stay in cache, and each block's gradient replaces its logits.
    for part in row_blocks(logits):
        values, grad = terms_with_gradient(
            _scaled(logits[part].float(), logit_scale),
            target[target_row[part]],
            labels[part],
            ce_labels[part],
            weights,
            None if row_weights is None else row_weights[part],
        )
        finished.append(torch.stack(list(vars(values).values())))
        if grad is not None:
            logits[part] = _scaled(grad, logit_scale)
    return torch.cat(finished, dim=1)


def _has_kernel(device: torch.device, weights: LossWeights) -> bool:
    """Whether the terms asked for have a kernel on this device, where Triton is installed."""
    needed = {name for name, weight in weights.terms.items() if weight}
    return device.type == "cuda" and needed <= set(KERNEL_TERMS) and triton_is_installed()


def vocabulary_loss(
    rows: Rows,
    head_weight: Float[Tensor, "V H"],
    bias_weight: Float[Tensor, "V R"] | None,
    weights: LossWeights,
    logit_scale: float,
    chunk_rows: int,
    *,
    joint: Float[Tensor, "V J"] | None = None,
    parts: Callable[[], list[Part]] | None = None,
) -> tuple[Float[Tensor, ""], RowStats]:
    """sum_m weight_m * (weighted terms of row m), and the per-row statistics. Differentiable in features and bias.

    Not divided: the caller divides once by the weights summed over micro-batches and ranks. `joint` is `[head_weight, bias_weight]`
    in the features' dtype, where the caller has it already. `parts` gives the parts of these rows, where the caller has planned
    them early (`PartPlan`).
    """
    plan = parts or PartPlan(rows.weights != 0, rows.target_row, len(rows.target), chunk_rows).parts
    divided = plan()
    with torch.autocast(rows.features.device.type, enabled=False):
        if joint is None:
            joint = joint_head(head_weight, bias_weight, rows.features.dtype)
        total, *stats = VocabularyLoss.apply(
            rows.features,
            rows.bias_features,
            bias_weight,
            joint,
            rows,
            weights,
            logit_scale,
            divided,
            torch.is_grad_enabled(),
        )
    return total, RowStats(*stats)


def joint_head(
    head_weight: Float[Tensor, "V H"], bias_weight: Float[Tensor, "V R"] | None, dtype: torch.dtype
) -> Float[Tensor, "V J"]:
    """`[head_weight, bias_weight]`, so that base logits and the sequential head's bias are one product."""
    head_weight = head_weight.to(dtype)
    return (
        head_weight
        if bias_weight is None
        else torch.cat([head_weight, bias_weight.detach().to(dtype)], dim=1)
    )


def target_probabilities(
    states: Float[Tensor, "P H"],
    lse: Float[Tensor, " P"],
    head_weight: Float[Tensor, "V H"],
    logit_scale: float,
    target_norm: str,
) -> Float[Tensor, "P V"]:
    """The verifier's probabilities of the draft vocabulary's tokens, fp32.

    `verifier_vocab`: exp(logit - lse) with lse over all W tokens, so a row sums to the kept tokens' true mass (<= 1).
    `draft_vocab`: renormalised over the kept tokens, which inflates alpha when mass was pruned.
    """
    logits = states @ head_weight.to(states.dtype).T
    p = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
    for part in row_blocks(logits):
        block = _scaled(logits[part].float(), logit_scale)
        if target_norm == "draft_vocab":
            p[part] = block.softmax(-1)
        else:
            torch.exp(block.sub_(lse[part].unsqueeze(-1)), out=p[part])
    return p


def row_blocks(logits: Float[Tensor, "M V"]) -> list[slice]:
    """Slices of rows whose fp32 logits fit a CPU core's cache; on other devices, one slice of them all."""
    count, width = logits.shape
    step = max(1, CPU_BLOCK_BYTES // (4 * width) if logits.device.type == "cpu" else count)
    return [slice(at, at + step) for at in range(0, count, step)]


def maximum_and_index(values: Float[Tensor, "M V"]) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """Largest value of each row and its first index.

    Index reductions are scalar loops on a CPU, plain maxima are not: so there, first the best of V / 128 segments.
    """
    width = math.gcd(values.shape[1], 128)
    if values.device.type != "cpu" or width < 16:
        return values.max(-1)
    segments = values.unflatten(1, (-1, width))
    top, segment = segments.amax(-1).max(-1)
    inside = segments[torch.arange(len(values)), segment].argmax(-1)
    return top, segment * width + inside


def _scaled(values: Float[Tensor, "M V"], scale: float) -> Float[Tensor, "M V"]:
    """values * scale, in place; most verifiers do not scale their logits."""
    return values if scale == 1.0 else values.mul_(scale)


def terms_with_gradient(
    logits: Float[Tensor, "M V"],
    p: Float[Tensor, "M V"],
    labels: Int[Tensor, " M"],
    ce_labels: Int[Tensor, " M"],
    weights: LossWeights,
    row_weights: Float[Tensor, " M"] | None,
) -> tuple[RowStats, Float[Tensor, "M V"] | None]:
    """Values of all terms per row, and d(sum of row_weights * terms)/d(logits) when `row_weights` is given.

    Every divergence D(p, q) has d D / d logit_v = q_v (e_v - sum_u q_u e_u) with e = d D / d q, which is the backward pass
    of a softmax; so the e of all terms are added first. The overlap needs only the set {q < p}: alpha = sum_{q<p} q +
    sum_{q>=p} p, so e = 1 on that set and 0 off it. Cross-entropy and kl are linear in q instead: q - onehot, q sum(p) - p.
    """
    top, top_index = maximum_and_index(logits)
    q = logits.softmax(-1)
    lse = top - q.gather(1, top_index.unsqueeze(1)).squeeze(1).log()  # avoids a second pass of exponentials
    alpha = torch.minimum(q, p).sum(-1).clamp_(max=1.0)

    known = labels >= 0
    safe = labels.clamp(min=0).unsqueeze(1)
    q_label = (logits.gather(1, safe).squeeze(1) - lse).exp()
    p_label = p.gather(1, safe).squeeze(1)
    label_keep = torch.where(known, (q_label / p_label.clamp(min=TINY)).clamp(max=1.0), 0.0)
    greedy_hit = (known & (top_index == labels)).float()

    scale = {name: weight for name, weight in weights.terms.items() if weight}
    loss = torch.zeros_like(alpha)
    overlap = torch.zeros_like(alpha)  # -d loss / d alpha
    divergence = torch.full_like(alpha, scale.get("kl", 0.0))  # weight of kl
    if "tv" in scale or "l1" in scale:
        weight = scale.get("tv", 0.0) + 2.0 * scale.get("l1", 0.0)
        loss += weight * (1.0 - alpha)
        overlap += weight
    if "nla" in scale:
        floor = alpha.clamp(min=TINY)
        loss -= scale["nla"] * floor.log()
        overlap += scale["nla"] / floor
    if "lk_hybrid" in scale:
        blend = (-LK_ETA * alpha).exp()
        loss += scale["lk_hybrid"] * (1.0 - blend) * (1.0 - alpha)
        overlap += scale["lk_hybrid"] * (1.0 - blend)
        divergence += scale["lk_hybrid"] * blend
    ce_known = (ce_labels >= 0).float() * scale.get("ce", 0.0)
    ce_place = ce_labels.clamp(min=0).unsqueeze(1)
    if "ce" in scale:
        loss += ce_known * (lse - logits.gather(1, ce_place).squeeze(1))

    if "kl" in scale or "lk_hybrid" in scale:
        mass = p.sum(-1)
        loss += divergence * (torch.xlogy(p, p).sum(-1) - (p * logits).sum(-1) + mass * lse)
    slopes = []  # (e, weight of its term)
    for name, value_and_slope in (("rkl", _reverse_kl), ("jsd", _jensen_shannon)):
        if name in scale:
            value, e = value_and_slope(p, q, logits - lse.unsqueeze(1))
            loss += scale[name] * value
            slopes.append((e, torch.full_like(alpha, scale[name])))
    stats = RowStats(alpha=alpha, label_keep=label_keep, greedy_hit=greedy_hit, loss=loss)
    if row_weights is None:
        return stats, None

    if {"tv", "l1", "nla", "lk_hybrid"} & set(scale):
        # As numbers, not booleans: selecting by a boolean is a scalar loop on a CPU.
        slopes.append((torch.lt(q, p, out=torch.empty_like(q)), -overlap))
    slope = None
    for e, weight in slopes:
        e = e.mul_((weight * row_weights).unsqueeze(1))
        slope = e if slope is None else slope.add_(e)
    grad = (
        torch.zeros_like(q) if slope is None else torch.ops.aten._softmax_backward_data(slope, q, -1, q.dtype)
    )
    if "kl" in scale or "lk_hybrid" in scale:
        kl_weight = row_weights * divergence
        grad.addcmul_(q, (kl_weight * mass).unsqueeze(1)).addcmul_(p, kl_weight.unsqueeze(1), value=-1.0)
    if "ce" in scale:
        ce_weight = (row_weights * ce_known).unsqueeze(1)
        grad.addcmul_(q, ce_weight).scatter_add_(1, ce_place, -ce_weight)
    return stats, grad


def _reverse_kl(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M V"]]:
    """sum q log(q/p) per row, and its derivative with respect to q up to a constant, which the softmax removes."""
    e = log_q - p.clamp(min=TINY).log()
    return (q * e).sum(-1), e


def _jensen_shannon(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M V"]]:
    """Jensen-Shannon divergence per row, and its derivative with respect to q up to a constant."""
    middle = (0.5 * (p + q)).clamp(min=TINY).log()
    e = 0.5 * (log_q - middle)
    return 0.5 * (torch.xlogy(p, p) - p * middle).sum(-1) + (q * e).sum(-1), e


def plain_terms(
    logits: Float[Tensor, "M V"], p: Float[Tensor, "M V"], labels: Int[Tensor, " M"], weights: LossWeights
) -> Float[Tensor, " M"]:
    """The weighted terms of every row as one ordinary autograd expression: readable, slow, the tests' oracle."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    log_p = p.clamp(min=TINY).log()
    kl = (p * (log_p - log_q)).sum(-1)
    ce_label = labels if weights.ce_label == "text" else p.argmax(-1)
    ce = torch.where(ce_label >= 0, F.nll_loss(log_q, ce_label.clamp(min=0), reduction="none"), 0.0)
    blend = (-LK_ETA * alpha.detach()).exp()
    log_m = (0.5 * (p + q)).clamp(min=TINY).log()
    values = {
        "ce": ce,
        "tv": 1.0 - alpha,
        "l1": (p - q).abs().sum(-1) + (1.0 - p.sum(-1)),
        "kl": kl,
        "rkl": (q * (log_q - log_p)).sum(-1),
        "jsd": 0.5 * ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)),
        "nla": -alpha.clamp(min=TINY).log(),
        "lk_hybrid": blend * kl + (1.0 - blend) * (1.0 - alpha),
    }
    return sum(weight * values[name] for name, weight in weights.terms.items())


def confidence_loss(
    logits: Float[Tensor, " M"], alpha: Float[Tensor, " M"], row_weights: Float[Tensor, " M"]
) -> Float[Tensor, ""]:
    """sum_m weight_m BCE(sigmoid(logit_m), alpha_m), alpha detached     (paper eq. 11)."""
    losses = F.binary_cross_entropy_with_logits(logits.float(), alpha.detach(), reduction="none")
    return (losses * row_weights).sum()
