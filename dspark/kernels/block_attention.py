"""Attention of blocks to their context and to themselves, forward and backward, without a mask in memory.

A block at anchor a sees `start .. a - 1` of its row's context, one run of keys, and its own slots. So a tile of queries needs
two numbers a query to know what it sees, most of its key tiles need no mask at all, and a key tile is seen by one run of
queries. Softmax is online, in base 2 and fp32 (FlashAttention-2, arXiv 2307.08691); scores and probabilities are recomputed in
the backward pass from the log-sum-exp of every query. The plain form is `dspark.nn.attention.dense_attention`.

Queries of a row are numbered `anchor * slots + slot`, block keys `anchor * width + slot`. `slots` may be fewer than `width`: the
last slots of each block, where a layer's other outputs are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

LOG2E = 1.4426950408889634
KEY_TILE = 64  # context keys of a program that sums gradients of keys and values


@triton.jit
def _facts(anchors, starts, m, count, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr):
    """Block, slot, first visible context key and anchor of queries `m`; queries beyond the last repeat the last block."""
    block = tl.minimum(m // SLOTS, count - 1)
    slot = m % SLOTS + (WIDTH - SLOTS)
    anchor = tl.load(anchors + block).to(tl.int32)
    first = tl.load(starts + block).to(tl.int32)
    if WINDOW > 0:
        first = tl.maximum(first, anchor + slot - WINDOW + 1)
    return block, slot, first, anchor


@triton.jit
def _sees_own(block, slot, key, WIDTH: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query sees block key `key`: its own block's, on windowed layers causally and within the window."""
    seen = block == key // WIDTH
    if WINDOW > 0:
        inner = key % WIDTH
        seen = seen & (inner <= slot) & (inner > slot - WINDOW)
    return seen


@triton.jit
def _rows(base, index, stride, d, inside, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows `index` of a [*, D] matrix whose rows lie `stride` apart."""
    at = base + index[:, None] * stride + d[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _attend_to(
    acc, top, total, q, k, v, lo, hi, end, stride, d, scale, block, slot, first, anchor,
    OWN: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo .. hi - 1."""
    lane = tl.arange(0, BLOCK_N)
    for at in range(lo, hi, BLOCK_N):
        key = at + lane
        kt = _rows(k, key, stride, d, key < end, D, MASKED or PADDED)
        scores = tl.dot(q, tl.trans(kt), input_precision="ieee") * scale
        if MASKED:
            if OWN:
                seen = _sees_own(block[:, None], slot[:, None], key[None, :], WIDTH, WINDOW)
            else:
                seen = (key[None, :] >= first[:, None]) & (key[None, :] < anchor[:, None])
            scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)  # a row may have seen nothing yet
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        vt = _rows(v, key, stride, d, key < end, D, MASKED or PADDED)
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
    q, k_context, v_context, k_block, v_block, anchors, starts, out, lse, scale, count, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = D != BLOCK_D
    tile = tl.program_id(0)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    queries = count * SLOTS
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = m < queries
    block, slot, first, anchor = _facts(
        anchors + row * count, starts + row * count, m, count, SLOTS, WIDTH, WINDOW
    )
    stride = KV_HEADS * D
    q_base = q + row * queries * HEADS * D + head * D
    qt = _rows(q_base, m.to(tl.int64), HEADS * D, d, inside, D, True)
    context = row * length * stride + kv_head * D
    own = row * count * WIDTH * stride + kv_head * D

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    lo, a, b, hi = _unmasked(first, anchor, BLOCK_N)
    kc, vc = k_context + context, v_context + context
    acc, top, total = _attend_to(
        acc, top, total, qt, kc, vc, lo, a, length, stride, d, scale, block, slot, first, anchor,
        False, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend_to(
        acc, top, total, qt, kc, vc, a, b, length, stride, d, scale, block, slot, first, anchor,
        False, False, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend_to(
        acc, top, total, qt, kc, vc, b, hi, length, stride, d, scale, block, slot, first, anchor,
        False, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend_to(
        acc, top, total, qt, k_block + own, v_block + own, tl.min(block, 0) * WIDTH, (tl.max(block, 0) + 1) * WIDTH,
        count * WIDTH, stride, d, scale, block, slot, first, anchor, True, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    place = out + row * queries * HEADS * D + head * D + m.to(tl.int64)[:, None] * HEADS * D + d[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + m, top + tl.log2(total), mask=inside)


@triton.jit
def _query_gradient(
    acc, q, grad, lse, delta, k, v, lo, hi, end, stride, d, scale, block, slot, first, anchor,
    OWN: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_N)
    for at in range(lo, hi, BLOCK_N):
        key = at + lane
        kt = _rows(k, key, stride, d, key < end, D, MASKED or PADDED)
        vt = _rows(v, key, stride, d, key < end, D, MASKED or PADDED)
        p = tl.exp2(tl.dot(q, tl.trans(kt), input_precision="ieee") * scale - lse[:, None])
        if MASKED:
            if OWN:
                seen = _sees_own(block[:, None], slot[:, None], key[None, :], WIDTH, WINDOW)
            else:
                seen = (key[None, :] >= first[:, None]) & (key[None, :] < anchor[:, None])
            p = tl.where(seen, p, 0.0)
        slope = p * (tl.dot(grad, tl.trans(vt), input_precision="ieee") - delta[:, None])
        acc = tl.dot(slope.to(kt.dtype), kt, acc, input_precision="ieee")
    return acc


@triton.jit
def _backward_queries(
    q, k_context, v_context, k_block, v_block, anchors, starts, grad, lse, delta, grad_q, scale, count, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = D != BLOCK_D
    tile = tl.program_id(0)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    queries = count * SLOTS
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = m < queries
    block, slot, first, anchor = _facts(
        anchors + row * count, starts + row * count, m, count, SLOTS, WIDTH, WINDOW
    )
    stride = KV_HEADS * D
    base = row * queries * HEADS * D + head * D
    qt = _rows(q + base, m.to(tl.int64), HEADS * D, d, inside, D, True)
    gt = _rows(grad + base, m.to(tl.int64), HEADS * D, d, inside, D, True)
    facts = tl.program_id(1).to(tl.int64) * queries + m
    lse_m = tl.load(lse + facts, mask=inside, other=0.0)
    delta_m = tl.load(delta + facts, mask=inside, other=0.0)
    context = row * length * stride + kv_head * D
    own = row * count * WIDTH * stride + kv_head * D
    kc, vc = k_context + context, v_context + context

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lo, a, b, hi = _unmasked(first, anchor, BLOCK_N)
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, kc, vc, lo, a, length, stride, d, scale, block, slot, first, anchor,
        False, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, kc, vc, a, b, length, stride, d, scale, block, slot, first, anchor,
        False, False, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, kc, vc, b, hi, length, stride, d, scale, block, slot, first, anchor,
        False, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    acc = _query_gradient(
        acc, qt, gt, lse_m, delta_m, k_block + own, v_block + own, tl.min(block, 0) * WIDTH,
        (tl.max(block, 0) + 1) * WIDTH, count * WIDTH, stride, d, scale, block, slot, first, anchor,
        True, True, WIDTH, WINDOW, D, PADDED, BLOCK_N,
    )  # fmt: skip
    place = grad_q + base + m.to(tl.int64)[:, None] * HEADS * D + d[None, :]
    # scale holds log2(e) for the scores in base 2, which the gradient must not.
    acc = acc * (scale / 1.4426950408889634)
    tl.store(place, acc.to(grad_q.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def _key_gradient(
    grad_k, grad_v, k, v, key, q, grad, lse, delta, anchors, starts, lo, hi, count, d, scale,
    OWN: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what queries lo .. hi - 1 of one head give to the gradients of a tile of keys and values."""
    lane = tl.arange(0, BLOCK_M)
    for at in range(lo, hi, BLOCK_M):
        m = at + lane
        inside = m < hi
        qt = _rows(q, m, HEADS * D, d, inside, D, MASKED or PADDED)
        gt = _rows(grad, m, HEADS * D, d, inside, D, MASKED or PADDED)
        if MASKED:
            lse_m = tl.load(lse + m, mask=inside, other=0.0)
            delta_m = tl.load(delta + m, mask=inside, other=0.0)
        else:
            lse_m = tl.load(lse + m)
            delta_m = tl.load(delta + m)
        p = tl.exp2(
            tl.dot(k, tl.trans(qt), input_precision="ieee") * scale - lse_m[None, :]
        )  # [keys, queries]
        if MASKED:
            block, slot, first, anchor = _facts(anchors, starts, m, count, SLOTS, WIDTH, WINDOW)
            if OWN:
                seen = _sees_own(block[None, :], slot[None, :], key[:, None], WIDTH, WINDOW)
            else:
                seen = (key[:, None] >= first[None, :]) & (key[:, None] < anchor[None, :])
            p = tl.where(seen & inside[None, :], p, 0.0)
        grad_v = tl.dot(p.to(gt.dtype), gt, grad_v, input_precision="ieee")
        slope = p * (tl.dot(v, tl.trans(gt), input_precision="ieee") - delta_m[None, :])
        grad_k = tl.dot(slope.to(qt.dtype), qt, grad_k, input_precision="ieee")
    return grad_k, grad_v


@triton.jit
def _backward_keys(
    q, k, v, anchors, starts, ranges, grad, lse, delta, grad_k, grad_v, scale, count, keys, tiles,
    OWN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = D != BLOCK_D
    SHARE: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    row = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    queries = count * SLOTS
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    stride = KV_HEADS * D
    base = row * keys * stride + kv_head * D
    kt = _rows(k + base, key, stride, d, key < keys, D, True)
    vt = _rows(v + base, key, stride, d, key < keys, D, True)
    # Queries that see some key of the tile: lo .. hi - 1; of those, a .. b - 1 see all of them.
    if OWN:
        lo = tile * BLOCK_N // WIDTH * SLOTS
        hi = tl.minimum((tile * BLOCK_N + BLOCK_N - 1) // WIDTH + 1, count) * SLOTS
        a = lo
        b = lo
    else:
        facts = ranges + (row * tiles + tile) * 4
        lo = tl.load(facts)
        hi = tl.load(facts + 3)
        a = tl.minimum(lo + (tl.load(facts + 1) - lo + BLOCK_M - 1) // BLOCK_M * BLOCK_M, tl.maximum(hi, lo))
        b = a + tl.maximum(tl.load(facts + 2) - a, 0) // BLOCK_M * BLOCK_M
    anchors += row * count
    starts += row * count
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for i in range(SHARE):
        head = kv_head * SHARE + i
        q_head = q + row * queries * HEADS * D + head * D
        grad_head = grad + row * queries * HEADS * D + head * D
        lse_head = lse + (row * HEADS + head) * queries
        delta_head = delta + (row * HEADS + head) * queries
        dk, dv = _key_gradient(
            dk, dv, kt, vt, key, q_head, grad_head, lse_head, delta_head, anchors, starts, lo, a, count, d, scale,
            OWN, True, HEADS, SLOTS, WIDTH, WINDOW, D, PADDED, BLOCK_M,
        )  # fmt: skip
        if not OWN:
            dk, dv = _key_gradient(
                dk, dv, kt, vt, key, q_head, grad_head, lse_head, delta_head, anchors, starts, a, b, count, d, scale,
                OWN, False, HEADS, SLOTS, WIDTH, WINDOW, D, PADDED, BLOCK_M,
            )  # fmt: skip
        dk, dv = _key_gradient(
            dk, dv, kt, vt, key, q_head, grad_head, lse_head, delta_head, anchors, starts, b, hi, count, d, scale,
            OWN, True, HEADS, SLOTS, WIDTH, WINDOW, D, PADDED, BLOCK_M,
        )  # fmt: skip
    place = base + key[:, None] * stride + d[None, :]
    mask = (key < keys)[:, None] & (d < D)[None, :]
    dk = dk * (scale / 1.4426950408889634)
    tl.store(grad_k + place, dk.to(grad_k.dtype.element_ty), mask=mask)
    tl.store(grad_v + place, dv.to(grad_v.dtype.element_ty), mask=mask)


@triton.jit
def _row_products(
    a, b, out, queries, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """out[row, head, m] = a[row, m, head] . b[row, m, head], in fp32."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    d = tl.arange(0, BLOCK_D)
    inside = m < queries
    at = (row * queries + m.to(tl.int64)[:, None]) * HEADS * D + head * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    product = tl.load(a + at, mask=mask, other=0.0).to(tl.float32) * tl.load(b + at, mask=mask, other=0.0).to(
        tl.float32
    )
    tl.store(out + tl.program_id(1).to(tl.int64) * queries + m, tl.sum(product, 1), mask=inside)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of the three kernels; what an H200 ran fastest, by element size and head dimension.

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
        return cls(tile | {"num_stages": 3}, tile, tile | {"BLOCK_N": KEY_TILE})


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
        lse = torch.empty(rows, heads, count * slots, dtype=torch.float32, device=q.device)
        options = Tiles.of(q).forward
        _forward[(triton.cdiv(count * slots, options["BLOCK_M"]), rows * heads)](
            q, k_context, v_context, k_block, v_block, anchors, starts, out, lse, dim**-0.5 * LOG2E, count,
            k_context.shape[1], **shape, **options,
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
        queries, scale = count * slots, dim**-0.5 * LOG2E
        grad = grad.contiguous()
        shape, tiles = _shape(q, k_context, k_block, ctx.window), Tiles.of(q)
        delta = torch.empty_like(lse)
        _row_products[(triton.cdiv(queries, 64), rows * heads)](
            grad, out, delta, queries, HEADS=heads, D=dim, BLOCK_D=shape["BLOCK_D"], BLOCK_M=64
        )
        grad_q = torch.empty_like(q)
        _backward_queries[(triton.cdiv(queries, tiles.queries["BLOCK_M"]), rows * heads)](
            q, k_context, v_context, k_block, v_block, anchors, starts, grad, lse, delta, grad_q, scale, count, length,
            **shape, **tiles.queries,
        )  # fmt: skip
        grads = []
        for k, v, keys, own in (
            (k_context, v_context, length, False),
            (k_block, v_block, count * width, True),
        ):
            grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
            _backward_keys[(triton.cdiv(keys, tiles.keys["BLOCK_N"]), rows * kv_heads)](
                q, k, v, anchors, starts, ranges, grad, lse, delta, grad_k, grad_v, scale, count, keys,
                ranges.shape[1], OWN=own, **shape, **tiles.keys,
            )  # fmt: skip
            grads += [grad_k, grad_v]
        return grad_q, *grads, None, None, None, None


def _shape(q: Tensor, k_context: Tensor, k_block: Tensor, window: int | None) -> dict[str, int]:
    """The compile-time numbers of all kernels."""
    return {
        "HEADS": q.shape[3],
        "KV_HEADS": k_context.shape[2],
        "SLOTS": q.shape[2],
        "WIDTH": k_block.shape[2],
        "WINDOW": window or 0,
        "D": q.shape[4],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[4])),
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
