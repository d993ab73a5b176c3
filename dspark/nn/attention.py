"""Attention from block queries to injected context and to their own block.

Three forms of one function, chosen by `plan_attention`:

* `GroupedPlan` (CPU and the general fall-back): anchors are ascending, so neighbouring anchors share almost all of their
  context. A group of them attends to `context[lo:hi]` and to the group's own blocks in one product; cost is
  A (S + Q) up to the group size, never (S + A Q)^2.
* `KernelPlan` (CUDA): Triton kernels that skip what no slot sees, forward and backward (`dspark/kernels/block_attention.py`).
* `dense_attention`: softmax over everything with a mask, the tests' oracle.

Visibility itself is defined once, in `dspark.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.blocks import DraftBatch, visible, visible_in_block
from dspark.kernels import triton_is_installed

BACKENDS = ("auto", "grouped", "kernel", "dense")
GROUP = (
    16  # anchors a grouped call; larger groups waste work on each other's blocks, smaller ones on launches
)

KEY_STEP = 64  # keys of a grouped call come in multiples of this


def resolve_backend(backend: str, device: torch.device) -> str:
    """The form that `auto` means on this device. Raises ValueError for unknown names, and for the kernel without CUDA."""
    if backend not in BACKENDS:
        raise ValueError(f"attention_backend is {backend!r}; expected one of {BACKENDS}.")
    if backend == "auto":
        return "kernel" if device.type == "cuda" and triton_is_installed() else "grouped"
    if backend == "kernel" and not (device.type == "cuda" and triton_is_installed()):
        raise ValueError(
            "attention_backend is 'kernel', which needs a CUDA device and Triton; use 'auto' or 'grouped'."
        )
    return backend


def plan_attention(
    batch: DraftBatch, block_size: int, windows: set, backend: str
) -> dict[int | None, GroupedPlan | KernelPlan | DensePlan]:
    """Masks of one batch, computed once and shared by all layers: one plan for each window in use (None = full)."""
    kind = {"grouped": GroupedPlan, "kernel": KernelPlan, "dense": DensePlan}[
        resolve_backend(backend, batch.anchors.device)
    ]
    starts = batch.doc_start.gather(1, batch.anchors)
    return {
        window: kind.build(batch.anchors, starts, batch.input_ids.shape[1], block_size, window)
        for window in windows
    }


def _dense_mask(
    anchors: Int[Tensor, " A"],
    starts: Int[Tensor, " A"],
    lo: int,
    hi: int,
    queries: range,
    width: int,
    window: int | None,
) -> Bool[Tensor, "AQ K"]:
    """Mask of the query slots of some anchors against `context[lo:hi] ++ their own blocks` (`width` slots each)."""
    device = anchors.device
    slot = torch.arange(queries.start, queries.stop, device=device)
    key = torch.arange(lo, hi, device=device)
    to_context = visible(
        anchors[:, None, None], slot[None, :, None], starts[:, None, None], key[None, None, :], window
    )
    count = len(anchors)
    to_context = to_context.expand(count, len(slot), len(key))  # without a window all slots see alike
    in_block = visible_in_block(slot[:, None], torch.arange(width, device=device)[None, :], window)
    own = torch.eye(count, dtype=torch.bool, device=device)
    to_blocks = own[:, None, :, None] & in_block[None, :, None, :]  # [A, q, A, Q]
    return torch.cat([to_context, to_blocks.reshape(count, len(slot), count * width)], dim=-1).flatten(0, 1)


class GroupedAttention(torch.autograd.Function):
    """Softmax attention of every group of anchors, forward and backward written out.

    Two batched products and a softmax a group; on a CPU the backward pass of the fused kernel is several times slower.
    Query heads that share a key head ride along as further queries. Scores and probabilities have the inputs' dtype; softmax
    sums in fp32 inside, and so do the gradients of context keys and values, to which many groups add.
    """

    @staticmethod
    def forward(ctx, q, k_context, v_context, k_block, v_block, plan):
        rows, anchors, slots, heads, dim = q.shape
        kv_heads, width = k_context.shape[2], plan.block_size
        share = heads // kv_heads
        queries = q.new_empty(rows, kv_heads, anchors, slots, share, dim)
        torch.mul(q.unflatten(3, (kv_heads, share)).permute(0, 3, 1, 2, 4, 5), dim**-0.5, out=queries)
        k_context, v_context = k_context.transpose(1, 2), v_context.transpose(1, 2)  # [B, g, S, d]
        k_block, v_block = k_block.flatten(1, 2).transpose(1, 2), v_block.flatten(1, 2).transpose(1, 2)
        out = torch.empty_like(queries)
        saved = []
        for b, group in plan.all_groups():
            part, own = group.anchors, group.slots(width)
            k = torch.cat([k_context[b, :, group.lo : group.hi], k_block[b, :, own]], dim=1)  # [g, K, d]
            v = torch.cat([v_context[b, :, group.lo : group.hi], v_block[b, :, own]], dim=1)
            scores = torch.bmm(queries[b, :, part].flatten(1, 3), k.transpose(1, 2))  # [g, n Q share, K]
            hidden = group.hidden.view(-1, width, k.shape[1])[:, -slots:, None, group.clear :].to(q.dtype)
            scores.view(kv_heads, -1, slots, share, k.shape[1])[..., group.clear :].add_(hidden)
            weights = scores.softmax(-1)
            out[b, :, part] = torch.bmm(weights, v).view_as(out[b, :, part])
            if any(ctx.needs_input_grad):
                saved += [k, v, weights]
        ctx.plan, ctx.length = plan, k_context.shape[2]
        ctx.save_for_backward(queries, *saved)
        return out.permute(0, 2, 3, 1, 4, 5).reshape(q.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        queries, *saved = ctx.saved_tensors
        rows, kv_heads, anchors, slots, share, dim = queries.shape
        width = ctx.plan.block_size
        grad = grad.unflatten(3, (kv_heads, share)).permute(0, 3, 1, 2, 4, 5).contiguous()
        grad_q = torch.empty_like(queries)
        shape = rows, kv_heads, ctx.length, dim
        grad_context = [queries.new_zeros(shape, dtype=torch.float32) for _ in range(2)]
        grad_block = [queries.new_empty(rows, kv_heads, anchors * width, dim) for _ in range(2)]
        for i, (b, group) in enumerate(ctx.plan.all_groups()):
            part, own, seen = group.anchors, group.slots(width), group.hi - group.lo
            k, v, weights = saved[3 * i : 3 * i + 3]
            upstream = grad[b, :, part].flatten(1, 3)
            slope = torch.ops.aten._softmax_backward_data(
                torch.bmm(upstream, v.transpose(1, 2)), weights, -1, weights.dtype
            )
            grad_q[b, :, part] = torch.bmm(slope, k).view_as(grad_q[b, :, part])
            grad_k = torch.bmm(slope.transpose(1, 2), queries[b, :, part].flatten(1, 3))
            grad_v = torch.bmm(weights.transpose(1, 2), upstream)
            for of_context, of_block, both in zip(grad_context, grad_block, (grad_k, grad_v), strict=True):
                of_context[b, :, group.lo : group.hi] += both[:, :seen]
                of_block[b, :, own] = both[:, seen:]
        grad_q = (grad_q * dim**-0.5).permute(0, 2, 3, 1, 4, 5).reshape(rows, anchors, slots, -1, dim)
        context = [g.to(queries.dtype).transpose(1, 2) for g in grad_context]
        block = [g.transpose(1, 2).unflatten(1, (anchors, width)) for g in grad_block]
        return grad_q, *context, *block, None


@dataclass
class Group:
    """Neighbouring anchors of one row that attend to `context[lo:hi]` and to their own blocks in one product.

    `hidden` is the additive mask [n Q, hi - lo + n Q] of all query slots; the first `clear` keys are hidden from none of them.
    """

    anchors: slice
    lo: int
    hi: int
    clear: int
    hidden: Float[Tensor, "nQ K"]

    def slots(self, width: int) -> slice:
        """Where the group's block tokens lie among all of the row's."""
        return slice(self.anchors.start * width, self.anchors.stop * width)


def _padded(lo: int, hi: int, own: int, length: int) -> tuple[int, int]:
    """A context span that holds [lo, hi) and, with `own` block keys, is a multiple of `KEY_STEP` where the row allows.

    The mask hides what is added. Products on a CPU are compiled for their shape: with spans as they come, nearly every call of a
    training run would wait for a new kernel, which takes several times as long as the product.
    """
    missing = -(hi - lo + own) % KEY_STEP
    later = min(missing, length - hi)
    return max(0, lo - (missing - later)), hi + later


@dataclass
class GroupedPlan:
    """`groups[b]` covers the anchors of row b, in order."""

    groups: list[list[Group]]
    block_size: int

    @classmethod
    def build(
        cls,
        anchors: Int[Tensor, "B A"],
        starts: Int[Tensor, "B A"],
        length: int,
        block_size: int,
        window: int | None,
    ) -> GroupedPlan:
        groups = []
        # Read at once: on CUDA each read waits for everything queued before it.
        places, begins = torch.stack([anchors, starts]).cpu()
        for row_anchors, row_starts, row_places, row_begins in zip(
            anchors, starts, places, begins, strict=True
        ):
            row = []
            for first in range(0, len(row_anchors), GROUP):
                own = slice(first, first + GROUP)
                part, begin = row_anchors[own], row_starts[own]
                lowest, highest = int(row_places[own].min()), int(row_begins[own].max())
                lo, hi = int(row_begins[own].min()), int(row_places[own].max())
                if window is not None:
                    lo = max(lo, lowest - window + 1)
                lo, hi = _padded(lo, hi, len(part) * block_size, length)
                mask = _dense_mask(part, begin, lo, hi, range(block_size), block_size, window)
                hidden = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
                in_all_windows = window is None or lo > hi + block_size - 1 - window
                clear = lowest - lo if highest <= lo and in_all_windows else 0
                row.append(Group(slice(first, first + len(part)), lo, hi, clear, hidden))
            groups.append(row)
        return cls(groups, block_size)

    def all_groups(self) -> Iterator[tuple[int, Group]]:
        """(row, group) of every group."""
        return ((b, group) for b, groups in enumerate(self.groups) for group in groups)

    def attend(
        self,
        q: Float[Tensor, "B A q h d"],
        k_context: Float[Tensor, "B S g d"],
        v_context: Float[Tensor, "B S g d"],
        k_block: Float[Tensor, "B A Q g d"],
        v_block: Float[Tensor, "B A Q g d"],
    ) -> Float[Tensor, "B A q h d"]:
        """Queries may cover only the last `q` slots of each block (the final layer needs no others)."""
        return GroupedAttention.apply(q, k_context, v_context, k_block, v_block, self)


@dataclass
class DensePlan:
    """All anchors of a row against all context and all blocks: the plain form, for tests and tiny inputs."""

    anchors: Tensor
    starts: Tensor
    length: int
    block_size: int
    window: int | None

    @classmethod
    def build(
        cls,
        anchors: Int[Tensor, "B A"],
        starts: Int[Tensor, "B A"],
        length: int,
        block_size: int,
        window: int | None,
    ) -> DensePlan:
        return cls(anchors, starts, length, block_size, window)

    def attend(
        self,
        q: Float[Tensor, "B A q h d"],
        k_context: Float[Tensor, "B S g d"],
        v_context: Float[Tensor, "B S g d"],
        k_block: Float[Tensor, "B A Q g d"],
        v_block: Float[Tensor, "B A Q g d"],
    ) -> Float[Tensor, "B A q h d"]:
        outputs = []
        queries = range(self.block_size - q.shape[2], self.block_size)
        for b in range(len(q)):
            mask = _dense_mask(
                self.anchors[b], self.starts[b], 0, self.length, queries, self.block_size, self.window
            )
            k = torch.cat([k_context[b], k_block[b].flatten(0, 1)])
            v = torch.cat([v_context[b], v_block[b].flatten(0, 1)])
            outputs.append(dense_attention(q[b], k, v, mask))
        return torch.stack(outputs)


def dense_attention(
    q: Float[Tensor, "A q h d"],
    k: Float[Tensor, "K g d"],
    v: Float[Tensor, "K g d"],
    mask: Bool[Tensor, "Aq K"],
) -> Float[Tensor, "A q h d"]:
    """softmax(q k^T / sqrt(d)) v with masked scores at minus infinity, written out."""
    share = q.shape[2] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = torch.einsum("nhd,khd->hnk", q.flatten(0, 1), k).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("hnk,khd->nhd", weights, v).view(q.shape)


@dataclass
class KernelPlan:
    """One Triton kernel over all blocks of a batch (dspark/kernels/block_attention.py)."""

    anchors: Int[Tensor, "B A"]
    starts: Int[Tensor, "B A"]
    length: int
    block_size: int
    window: int | None
    ranges: dict[int, Tensor]

    @classmethod
    def build(
        cls,
        anchors: Int[Tensor, "B A"],
        starts: Int[Tensor, "B A"],
        length: int,
        block_size: int,
        window: int | None,
    ) -> KernelPlan:
        return cls(anchors.contiguous(), starts.contiguous(), length, block_size, window, {})

    def attend(
        self,
        q: Float[Tensor, "B A q h d"],
        k_context: Float[Tensor, "B S g d"],
        v_context: Float[Tensor, "B S g d"],
        k_block: Float[Tensor, "B A Q g d"],
        v_block: Float[Tensor, "B A Q g d"],
    ) -> Float[Tensor, "B A q h d"]:
        from dspark.kernels.block_attention import block_attention, key_ranges

        slots = q.shape[2]
        if slots not in self.ranges:
            self.ranges[slots] = key_ranges(
                self.anchors,
                self.starts,
                length=self.length,
                slots=slots,
                width=self.block_size,
                window=self.window,
            )
        return block_attention(
            q,
            k_context,
            v_context,
            k_block,
            v_block,
            self.anchors,
            self.starts,
            self.ranges[slots],
            self.window,
        )
