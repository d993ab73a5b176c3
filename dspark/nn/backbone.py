"""The block-parallel backbone (DFlash): Qwen3-style layers whose keys and values include the verifier's hidden states.

H_ctx = RMSNorm(W_c [h^(l1); ...; h^(lm)]) is one tensor for all layers (paper eq. 2). Each layer projects keys and values from
H_ctx, without an input norm, and from the block, after its input norm; queries come from the block alone (eq. 3). Parameter
names are those of served checkpoints, so exporting renames nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dspark.config import DraftConfig

# Variants of a region in one process, by shape among others, beyond which the compiler gives up: at 8 a sweep would.
VARIANTS = 1024

# What recomputing would take long. Largest magnitudes, which float8 scales with, are a pass over memory each.
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default, torch.ops.aten.amax.default)


@runtime_checkable
class Attends(Protocol):
    """What a layer needs of an attention form; see `dspark.nn.attention`."""

    def attend(
        self, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor: ...


@dataclass
class Rotary:
    """cos and sin for some positions, fp32 [..., head_dim / 2] each, computed afresh so that no cast can round them."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Int[Tensor, ...], head_dim: int, theta: float) -> Rotary:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
        frequencies = (theta**-exponent).float()
        angles = positions.unsqueeze(-1).float() * frequencies
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Float[Tensor, "... heads d"], dtype: torch.dtype) -> Float[Tensor, "... heads d"]:
        return rotated(x, self.cos, self.sin, dtype)


def rotated(
    x: Float[Tensor, "... heads d"], cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> Float[Tensor, "... heads d"]:
    """Rotate-half convention: the first half of the dimensions pairs with the second. fp32 inside, `dtype` outside."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if torch.compiler.is_compiling():  # the compiler derives the rotation back, and fuses both
        return _Rotation.turned(x, cos, sin).to(dtype)
    return _Rotation.apply(x, cos, sin, dtype)


class _Rotation(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin, dtype):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _Rotation.turned(x, cos, sin).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _Rotation.turned(grad, cos, -sin).to(ctx.dtype), None, None, None

    @staticmethod
    def turned(x: Float[Tensor, "... d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "... d"]:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat(
            [
                torch.addcmul(first * cos, second, sin, value=-1.0),
                torch.addcmul(second * cos, first, sin),
            ],
            dim=-1,
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32; the result has the input's dtype unless another is asked for."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... n"], dtype: torch.dtype | None = None) -> Float[Tensor, "... n"]:
        dtype = dtype or x.dtype
        # A compiler writes its own backward pass; given ours, torch 2.11 compiled wrong gradients.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps).to(dtype)
        return _CpuRMSNorm.apply(x, self.weight, self.eps, dtype)


class _CpuRMSNorm(torch.autograd.Function):
    """RMSNorm with its backward pass written out: on a CPU, half the passes over memory that autograd makes of it."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        wide = x.float()
        with torch.autocast("cpu", enabled=False):  # autocast would round the sum of squares to bf16
            mean_square = torch.linalg.vecdot(wide, wide).div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, wide = x.float() * scale, grad.float()
        product = wide * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight.float()).div_(-x.shape[-1]).unsqueeze(-1)
        grad_x = (wide * weight).addcmul_(normed, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class Attention(nn.Module):
    """Grouped-query attention with per-head norms on queries and keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Float[Tensor, "... hd"]) -> Float[Tensor, "... h d"]:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(
        self, x: Float[Tensor, "... H"], rotary: Rotary
    ) -> tuple[Float[Tensor, "... g d"], Float[Tensor, "... g d"]]:
        """Keys (normed, rotated) and values of context or block inputs alike."""
        keys, values = self.project_keys_values(x)
        return rotary.rotate(keys, values.dtype), values

    def project_keys_values(
        self, x: Float[Tensor, "... H"]
    ) -> tuple[Float[Tensor, "... g d"], Float[Tensor, "... g d"]]:
        """Keys, normed in fp32 and yet to be rotated, and values."""
        return self.k_norm(self._heads(self.k_proj(x)), torch.float32), self._heads(self.v_proj(x))

    def project_queries(self, x: Float[Tensor, "... H"]) -> Float[Tensor, "... h d"]:
        """Queries, normed in fp32 and yet to be rotated."""
        return self.q_norm(self._heads(self.q_proj(x)), torch.float32)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "... H"]) -> Float[Tensor, "... H"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm block layer. `first_query` drops leading slots from the output once no later layer needs them."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        sliding = config.layer_types[index] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "B A Q H"],
        rotary: Rotary,
        context: tuple[Float[Tensor, "B S g d"], Float[Tensor, "B S g d"]],
        attention: Attends,
        first_query: int,
        alike: bool = False,
        compiled: bool = False,
    ) -> Float[Tensor, "B A q H"]:
        before, after = region(Layer.before_attention, compiled), region(Layer.after_attention, compiled)
        q, k, v = before(self, x, rotary.cos, rotary.sin, first_query, alike)
        mixed = attention.attend(q, *context, k, v)
        return after(self, x[:, :, first_query:], mixed)

    def before_attention(
        self, x: Float[Tensor, "B A Q H"], cos: Tensor, sin: Tensor, first_query: int, alike: bool
    ) -> tuple[Float[Tensor, "B A q h d"], Float[Tensor, "B A Q g d"], Float[Tensor, "B A Q g d"]]:
        """Queries of the slots from `first_query` on, keys and values of all.

        `alike`: every slot but a block's first holds one and the same input, as in the first layer, where they are masks. Before
        the rotation they have the same query, key and value too, so these are projected once instead of in every slot.
        """
        attention = self.self_attn
        if alike:
            first, other = self.input_layernorm(x[:, :, :1]), self.input_layernorm(x[:1, :1, 1:2])
            pairs = zip(
                attention.project_keys_values(first), attention.project_keys_values(other), strict=True
            )
            keys, values = (_spread(*pair, x.shape[2]) for pair in pairs)
            queries = attention.project_queries(other)
            if first_query:
                queries = queries.expand(*x.shape[:2], x.shape[2] - first_query, -1, -1)
            else:
                queries = _spread(attention.project_queries(first), queries, x.shape[2])
        else:
            normed = self.input_layernorm(x)
            keys, values = attention.project_keys_values(normed)
            queries = attention.project_queries(normed[:, :, first_query:])
        ahead = cos[:, :, first_query:], sin[:, :, first_query:]
        return rotated(queries, *ahead, values.dtype), rotated(keys, cos, sin, values.dtype), values

    def after_attention(
        self, x: Float[Tensor, "B A q H"], mixed: Float[Tensor, "B A q h d"]
    ) -> Float[Tensor, "B A q H"]:
        x = x + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def _spread(first: Float[Tensor, "B A 1 g d"], other: Float[Tensor, "b a 1 g d"], slots: int) -> Tensor:
    """`first` in a block's first slot and `other` in all behind it, [B, A, slots, g, d]."""
    rest = other.expand(*first.shape[:2], slots - 1, *other.shape[3:])
    return torch.cat([first, rest], dim=2)


def region(function: Callable, compiled: bool) -> Callable:
    """`function`, or its compiled form, in which norms, rotations, casts and gates between matrix products are single kernels.

    Only products are kept for the backward pass; all else, bf16 copies of the weights too, is computed again there.
    """
    return _compiled(function) if compiled else function


@cache
def _compiled(function: Callable) -> Callable:
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, VARIANTS)
    # It warns, once, that recomputed regions must not work in place; these do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    keep_products = partial(create_selective_checkpoint_contexts, list(PRODUCTS))

    def lean(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=keep_products)

    # The compiler counts the shapes it has seen by code object, so every function needs one of its own.
    lean.__code__ = lean.__code__.replace(co_name=function.__qualname__)
    return torch.compile(lean, dynamic=False, fullgraph=True)
