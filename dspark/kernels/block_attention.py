"""Attention of blocks to their context and to themselves, forward and backward, without a mask in memory.

A block at anchor a sees `start .. a - 1` of its row's context, one run of keys, and its own slots. So a tile of queries needs
two numbers a query to know what it sees, most of its key tiles need no mask at all, and a key tile is seen by one run of
queries. Softmax is online, in base 2 and fp32 (FlashAttention-2, arXiv 2307.08691); scores and probabilities are recomputed in
the backward pass from the log-sum-exp of every query. The plain form is `dspark.nn.attention.dense_attention`.

Queries of a row are numbered `anchor * slots + slot`, block keys `anchor * width + slot`. `slots` may be fewer than `width`: the
last slots of each block, where a layer's other outputs are not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a key that a query does not see, and the highest score before any key: so far apart that a hidden key's weight is 0.
HIDDEN = tl.constexpr(-1.0e30)
LOWEST = tl.constexpr(-1.0e28)
KEY_TILE = 64  # context keys of a program that sums gradients of keys and values


@triton.jit
def _facts(anchors, starts, m, count, slots, WIDTH: tl.constexpr, WINDOW: tl.constexpr):
    """Block, slot, first visible context key and anchor of queries `m`; queries beyond the last repeat the last block."""
    block = tl.minimum(m // slots, count - 1)
    slot = m % slots + (WIDTH - slots)
    anchor = tl.load(anchors + block).to(tl.int32)
    first = tl.load(starts + block).to(tl.int32)
    if WINDOW > 0:
        first = tl.maximum(first, anchor + slot - WINDOW + 1)
    return block, slot, first, anchor


@triton.jit
def _sees(block, slot, first, anchor, key, OWN: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query sees a key of the context, or block key `key`: its own block's, causally and near on windowed layers."""
    if OWN:
        seen = block == key // WIDTH
        if WINDOW > 0:
            inner = key % WIDTH
            seen = seen & (inner <= slot) & (inner > slot - WINDOW)
    else:
        seen = (key >= first) & (key < anchor)
    return seen


@triton.jit
def _tile(
    x, begin, at, column, end, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """ROWS rows from row `begin + at` of a matrix with rows of STRIDE numbers, their D numbers from `column` on.

    `x` is a pointer, or a descriptor where COPIED. Rows from `begin + end` on are zeros, in a copy whatever is there: users hide
    them, and they must be finite.
    """
    if COPIED:
        tile = x.load([begin + at, column])
    else:
        index = at + tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        place = x + column + (begin + index).to(tl.int64)[:, None] * STRIDE + d[None, :]
        tile = tl.load(place, mask=(index < end)[:, None] & (d < D)[None, :], other=0.0)
    return tile


@triton.jit
def _store(
    x, values, begin, at, column, end, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write what `_tile` would read at the same place."""
    index = at + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    place = x + column + (begin + index).to(tl.int64)[:, None] * STRIDE + d[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=(index < end)[:, None] & (d < D)[None, :])


@triton.jit
def _attend_to(
    acc, top, total, q, k, v, begin, column, lo, a, b, hi, end, scale, block, slot, first, anchor,
    OWN: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo .. hi - 1, of which whole tiles of a .. b - 1 are seen by every query."""
    lane = tl.arange(0, BLOCK_N)
    for at in range(lo, hi, BLOCK_N):
        kt = _tile(k, begin, at, column, end, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
        scores = tl.dot(q, tl.trans(kt), input_precision="ieee") * scale
        if (at < a) | (at >= b):
            seen = _sees(
                block[:, None], slot[:, None], first[:, None], anchor[:, None], (at + lane)[None, :], OWN, WIDTH, WINDOW
            )  # fmt: skip
            scores = tl.where(seen, scores, HIDDEN)
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        vt = _tile(v, begin, at, column, end, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, top, total


@triton.jit
def _unmasked(first, anchor, BLOCK_N: tl.constexpr):
    """(lo, a, b, hi) of a query tile: keys lo .. hi - 1 hold all it sees; whole tiles of a .. b - 1 are seen by every query."""
    lo = tl.min(first, 0)
    hi = tl.max(anchor, 0)
    a = lo + (tl.max(first, 0) - lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    a = tl.minimum(a, tl.maximum(hi, lo))
    b = a + tl.maximum(tl.min(anchor, 0) - a, 0) // BLOCK_N * BLOCK_N
    return lo, a, b, hi


@triton.jit
def _forward(
    q, k_context, v_context, k_block, v_block, anchors, starts, out, lse, scale, count, slots, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = KV_HEADS * D
    tile = tl.program_id(0)
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    column = head // (HEADS // KV_HEADS) * D
    queries = count * slots
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < queries
    block, slot, first, anchor = _facts(
        anchors + row * count, starts + row * count, m, count, slots, WIDTH, WINDOW
    )
    qt = _tile(q, row * queries, tile * BLOCK_M, head * D, queries, HEADS * D, D, BLOCK_D, BLOCK_M, COPIED)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    lo, a, b, hi = _unmasked(first, anchor, BLOCK_N)
    acc, top, total = _attend_to(
        acc, top, total, qt, k_context, v_context, row * length, column, lo, a, b, hi, length, scale, block, slot, first, anchor,
        False, STRIDE, WIDTH, WINDOW, D, BLOCK_D, BLOCK_N, COPIED,
    )  # fmt: skip
    lo, hi = tl.min(block, 0) * WIDTH, (tl.max(block, 0) + 1) * WIDTH
    acc, top, total = _attend_to(
        acc, top, total, qt, k_block, v_block, row * count * WIDTH, column, lo, hi, hi, hi, count * WIDTH, scale, block, slot,
        first, anchor, True, STRIDE, WIDTH, WINDOW, D, BLOCK_D, BLOCK_N, COPIED,
    )  # fmt: skip
    mean = acc / total[:, None]
    _store(out, mean, row * queries, tile * BLOCK_M, head * D, queries, HEADS * D, D, BLOCK_D, BLOCK_M)
    facts = lse + tl.program_id(1).to(tl.int64) * queries + m
    # As a score before its scaling: what the backward pass takes off within the product.
    tl.store(facts, (top + tl.log2(total)) / scale, mask=inside)


@triton.jit
def _less(a, b, offset):
    """a b^T - offset, in the registers of the product: a term that is added afterwards would cost as many again."""
    start = tl.broadcast_to(-offset, (a.shape[0], b.shape[0]))
    return tl.dot(a, tl.trans(b), start, input_precision="ieee")


@triton.jit
def _offsets(offsets, head, m, queries, inside):
    """What the backward pass takes off the two products of queries `m`, [m, 2]; heads are counted over the batch."""
    at = (tl.cast(head, tl.int64) * queries + m)[:, None] * 2 + tl.arange(0, 2)[None, :]
    return tl.load(offsets + at, mask=inside[:, None], other=0.0)


@triton.jit
def _query_gradient(
    acc, q, grad, lse, delta, k, v, begin, column, lo, a, b, hi, end, scale, block, slot, first, anchor,
    OWN: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Add what keys lo .. hi - 1 give to the gradient of a tile of queries, but for the scale."""
    lane = tl.arange(0, BLOCK_N)
    for at in range(lo, hi, BLOCK_N):
        kt = _tile(k, begin, at, column, end, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
        vt = _tile(v, begin, at, column, end, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
        p = tl.exp2(_less(q, kt, lse[:, None]) * scale)
        if (at < a) | (at >= b):
            seen = _sees(
                block[:, None], slot[:, None], first[:, None], anchor[:, None], (at + lane)[None, :], OWN, WIDTH, WINDOW
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        slope = p * _less(grad, vt, delta[:, None])
        acc = tl.dot(slope.to(kt.dtype), kt, acc, input_precision="ieee")
    return acc


@triton.jit
def _backward_queries(
    q, k_context, v_context, k_block, v_block, anchors, starts, grad, offsets, grad_q, scale, count, slots, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = KV_HEADS * D
    tile = tl.program_id(0)
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    column = head // (HEADS // KV_HEADS) * D
    queries = count * slots
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < queries
    block, slot, first, anchor = _facts(
        anchors + row * count, starts + row * count, m, count, slots, WIDTH, WINDOW
    )
    at = tile * BLOCK_M
    qt = _tile(q, row * queries, at, head * D, queries, HEADS * D, D, BLOCK_D, BLOCK_M, COPIED)
    gt = _tile(grad, row * queries, at, head * D, queries, HEADS * D, D, BLOCK_D, BLOCK_M, COPIED)
    lse_m, delta_m = tl.split(_offsets(offsets, tl.program_id(1), m, queries, inside))

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lo, a, b, hi = _unmasked(first, anchor, BLOCK_N)
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, k_context, v_context, row * length, column, lo, a, b, hi, length, scale, block, slot, first,
        anchor, False, STRIDE, WIDTH, WINDOW, D, BLOCK_D, BLOCK_N, COPIED,
    )  # fmt: skip
    lo, hi = tl.min(block, 0) * WIDTH, (tl.max(block, 0) + 1) * WIDTH
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, k_block, v_block, row * count * WIDTH, column, lo, hi, hi, hi, count * WIDTH, scale, block,
        slot, first, anchor, True, STRIDE, WIDTH, WINDOW, D, BLOCK_D, BLOCK_N, COPIED,
    )  # fmt: skip
    # scale holds log2(e) for the scores in base 2, which the gradient must not.
    acc = acc * (scale / LOG2E)
    _store(grad_q, acc, row * queries, at, head * D, queries, HEADS * D, D, BLOCK_D, BLOCK_M)


@triton.jit
def _backward_keys(
    q, k, v, anchors, starts, ranges, grad, offsets, grad_k, grad_v, scale, count, slots, keys, tiles,
    OWN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = KV_HEADS * D
    SHARE: tl.constexpr = HEADS // KV_HEADS
    # Keys late in a document are seen by few. With heads first, those of all heads come last, and no long program ends alone.
    tile = tl.program_id(1)
    row = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    queries = count * slots
    first_key = tile * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    kt = _tile(k, row * keys, first_key, kv_head * D, keys, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
    vt = _tile(v, row * keys, first_key, kv_head * D, keys, STRIDE, D, BLOCK_D, BLOCK_N, COPIED)
    # Queries that see some key of the tile: lo .. hi - 1; of those, a .. b - 1 see all of them.
    if OWN:
        lo = tile * BLOCK_N // WIDTH * slots
        hi = tl.minimum((tile * BLOCK_N + BLOCK_N - 1) // WIDTH + 1, count) * slots
        a = lo
        b = lo
    else:
        own = ranges + (row * tiles + tile) * 4
        lo = tl.load(own)
        hi = tl.load(own + 3)
        a = tl.minimum(lo + (tl.load(own + 1) - lo + BLOCK_M - 1) // BLOCK_M * BLOCK_M, tl.maximum(hi, lo))
        b = a + tl.maximum(tl.load(own + 2) - a, 0) // BLOCK_M * BLOCK_M
    anchors += row * count
    starts += row * count
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    lane = tl.arange(0, BLOCK_M)
    steps = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M)
    heads = row * HEADS + kv_head * SHARE
    ahead = _offsets(offsets, heads, lo + lane, queries, lo + lane < hi)
    # One loop over the tiles of all heads that share these keys: its loads run ahead from one head to the next.
    for i in range(SHARE * steps):
        head = kv_head * SHARE + i // steps
        at = lo + i % steps * BLOCK_M
        qt = _tile(q, row * queries, at, head * D, hi, HEADS * D, D, BLOCK_D, BLOCK_M, COPIED)
        gt = _tile(grad, row * queries, at, head * D, hi, HEADS * D, D, BLOCK_D, BLOCK_M, COPIED)
        m = at + lane
        inside = m < hi
        # Small loads that a product begins with; no compiler starts them a step early, as it does those of the tiles.
        lse_m, delta_m = tl.split(ahead)
        later = lo + (i + 1) % steps * BLOCK_M + lane
        ahead = _offsets(
            offsets, heads + (i + 1) // steps, later, queries, (later < hi) & (i + 1 < SHARE * steps)
        )
        p = tl.exp2(_less(kt, qt, lse_m[None, :]) * scale)  # [keys, queries]
        if (at < a) | (at >= b):
            block, slot, first, anchor = _facts(anchors, starts, m, count, slots, WIDTH, WINDOW)
            seen = _sees(
                block[None, :], slot[None, :], first[None, :], anchor[None, :], key[:, None], OWN, WIDTH, WINDOW
            )  # fmt: skip
            p = tl.where(seen & inside[None, :], p, 0.0)
        dv = tl.dot(p.to(gt.dtype), gt, dv, input_precision="ieee")
        slope = p * _less(vt, gt, delta_m[None, :])
        dk = tl.dot(slope.to(qt.dtype), qt, dk, input_precision="ieee")
    dk = dk * (scale / LOG2E)
    _store(grad_k, dk, row * keys, first_key, kv_head * D, keys, STRIDE, D, BLOCK_D, BLOCK_N)
    _store(grad_v, dv, row * keys, first_key, kv_head * D, keys, STRIDE, D, BLOCK_D, BLOCK_N)


@triton.jit
def _write_offsets(
    grad, out, lse, offsets, queries, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """offsets[row, head, m] = (lse[row, head, m], grad[row, m, head] . out[row, m, head]), in fp32."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    d = tl.arange(0, BLOCK_D)
    inside = m < queries
    at = (row * queries + m.to(tl.int64)[:, None]) * HEADS * D + head * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    delta = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    delta *= tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    place = tl.program_id(1).to(tl.int64) * queries + m
    pair = tl.join(tl.load(lse + place, mask=inside, other=0.0), tl.sum(delta, 1))
    tl.store(offsets + place[:, None] * 2 + tl.arange(0, 2)[None, :], pair, mask=inside[:, None])


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of the three kernels; what an H200 ran fastest, by element size and head dimension (at 128,
    at the large geometry).

    The keys of a program that sums gradients are always `KEY_TILE`, which `key_ranges` counts with.
    """

    forward: dict[str, int]
    queries: dict[str, int]
    keys: dict[str, int]

    @classmethod
    def of(cls, q: Tensor) -> Tiles:
        tile = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
        if q.element_size() > 2 or q.shape[-1] > 128:  # twice the bytes in shared memory
            tile = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
            return cls(tile, tile, tile | {"BLOCK_N": KEY_TILE})
        ahead = tile | {"num_stages": 3}
        if q.shape[-1] <= 64:
            return cls(tile, ahead, ahead | {"BLOCK_N": KEY_TILE})
        return cls(ahead, tile, tile | {"BLOCK_N": KEY_TILE})


def key_ranges(
    anchors: Int[Tensor, "B A"],
    starts: Int[Tensor, "B A"],
    *,
    length: int,
    slots: int,
    width: int,
    window: int | None,
) -> Int[Tensor, "B J 4"]:
    """Which queries see each `KEY_TILE` context keys: (first that sees any, first and last + 1 of those that see all, last + 1).

    Anchors and the starts of their documents ascend within a row, so each is one run of queries.
    """
    first = torch.arange(0, length, KEY_TILE, device=anchors.device).expand(len(anchors), -1).contiguous()
    end = (first + KEY_TILE).clamp(max=length)
    lo = torch.searchsorted(anchors, first, right=True)
    hi = torch.searchsorted(starts, end)
    if window is None:
        whole = torch.searchsorted(anchors, end), torch.searchsorted(starts, first, right=True)
    else:
        hi = torch.minimum(hi, torch.searchsorted(anchors, end + (window - 1 - (width - slots))))
        whole = lo, lo
    return (torch.stack([lo, *whole, hi], dim=-1) * slots).int()


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_context, v_context, k_block, v_block, anchors, starts, ranges, window):
        rows, count, slots, heads, dim = q.shape
        q, k_context, v_context, k_block, v_block = (
            t.contiguous() for t in (q, k_context, v_context, k_block, v_block)
        )
        shape = _shape(q, k_context, k_block, window)
        out = torch.empty_like(q)
        lse = torch.empty(
            rows, heads, count * slots, dtype=torch.float32, device=q.device
        )  # before the scaling
        options = Tiles.of(q).forward
        view = _views(shape["COPIED"])
        _forward[(triton.cdiv(count * slots, options["BLOCK_M"]), rows * heads)](
            view(q, options["BLOCK_M"]), *(view(t, options["BLOCK_N"]) for t in (k_context, v_context, k_block, v_block)),
            anchors, starts, out, lse, dim**-0.5 * LOG2E.value, count, slots, k_context.shape[1], **shape, **options,
        )  # fmt: skip
        ctx.save_for_backward(q, k_context, v_context, k_block, v_block, anchors, starts, ranges, out, lse)
        ctx.window = window
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k_context, v_context, k_block, v_block, anchors, starts, ranges, out, lse = ctx.saved_tensors
        rows, count, slots, heads, dim = q.shape
        length, kv_heads, width = k_context.shape[1], k_context.shape[2], k_block.shape[2]
        queries, scale = count * slots, dim**-0.5 * LOG2E.value
        grad = grad.contiguous()
        shape, tiles = _shape(q, k_context, k_block, ctx.window), Tiles.of(q)
        offsets = lse.new_empty(*lse.shape, 2)
        _write_offsets[(triton.cdiv(queries, 64), rows * heads)](
            grad, out, lse, offsets, queries, HEADS=heads, D=dim, BLOCK_D=shape["BLOCK_D"], BLOCK_M=64
        )
        grad_q = torch.empty_like(q)
        view, options = _views(shape["COPIED"]), tiles.queries
        _backward_queries[(triton.cdiv(queries, options["BLOCK_M"]), rows * heads)](
            view(q, options["BLOCK_M"]), *(view(t, options["BLOCK_N"]) for t in (k_context, v_context, k_block, v_block)),
            anchors, starts, view(grad, options["BLOCK_M"]), offsets, grad_q, scale, count, slots, length, **shape, **options,
        )  # fmt: skip
        options = tiles.keys
        by_query = view(q, options["BLOCK_M"]), view(grad, options["BLOCK_M"])
        grads = []
        for k, v, keys, own in (
            (k_context, v_context, length, False),
            (k_block, v_block, count * width, True),
        ):
            grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
            _backward_keys[(rows * kv_heads, triton.cdiv(keys, options["BLOCK_N"]))](
                by_query[0], view(k, options["BLOCK_N"]), view(v, options["BLOCK_N"]), anchors, starts, ranges, by_query[1],
                offsets, grad_k, grad_v, scale, count, slots, keys, ranges.shape[1], OWN=own, **shape, **options,
            )  # fmt: skip
            grads += [grad_k, grad_v]
        return grad_q, *grads, None, None, None, None


def _views(copied: bool) -> Callable[[Tensor, int], Tensor | TensorDescriptor]:
    """How a kernel is given a [B, ..., heads, dim] tensor of which it reads tiles of some rows: itself, or a descriptor."""

    def view(x: Tensor, rows: int) -> Tensor | TensorDescriptor:
        if not copied:
            return x
        x = x if x.data_ptr() % 16 == 0 else x.clone()  # a part of another tensor may begin anywhere
        return TensorDescriptor.from_tensor(x.flatten(-2).flatten(0, -2), [rows, x.shape[-1]])

    return view


def _shape(q: Tensor, k_context: Tensor, k_block: Tensor, window: int | None) -> dict[str, int]:
    """The compile-time numbers of all kernels."""
    dim = q.shape[4]
    padded = max(16, triton.next_power_of_2(dim))
    # Hopper and later copy whole tiles by themselves, which leaves threads the registers that addresses would take.
    copies = q.device.type == "cpu" or torch.cuda.get_device_capability(q.device)[0] >= 9
    return {
        "HEADS": q.shape[3],
        "KV_HEADS": k_context.shape[2],
        "WIDTH": k_block.shape[2],
        "WINDOW": window or 0,
        "D": dim,
        "BLOCK_D": padded,
        "COPIED": copies and dim == padded,
    }


def block_attention(
    q: Float[Tensor, "B A q h d"],
    k_context: Float[Tensor, "B S g d"],
    v_context: Float[Tensor, "B S g d"],
    k_block: Float[Tensor, "B A Q g d"],
    v_block: Float[Tensor, "B A Q g d"],
    anchors: Int[Tensor, "B A"],
    starts: Int[Tensor, "B A"],
    ranges: Int[Tensor, "B J 4"],
    window: int | None,
) -> Float[Tensor, "B A q h d"]:
    """softmax(q k^T / sqrt(d)) v over what each slot sees. `q` may hold the last slots of each block only.

    `anchors` ascend within a row; `starts` are the row indices of their documents; `ranges` are `key_ranges` for these slots.
    Differentiable in the first five arguments.
    """
    return _BlockAttention.apply(q, k_context, v_context, k_block, v_block, anchors, starts, ranges, window)
