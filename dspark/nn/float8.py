"""Products of linear layers in 8-bit floating point, for training on CUDA devices that have them.

y = x W^T, dx = g W and dW = g^T x each take two float8 operands and give bf16; parameters, optimizer, norms, attention and the
residual stream stay as they are. An operand is divided by a scale, its largest magnitude over the largest number of the format,
taken afresh in every step:

| scaling | one scale for         | x, W | g    | sums                                     |
|---------|-----------------------|------|------|------------------------------------------|
| tensor  | each tensor           | e4m3 | e5m2 | forward fast, backward in full precision |
| row     | each row of a product | e4m3 | e4m3 | forward fast, backward in full precision |

A row of a product is what it contracts: x and W are scaled along the features for y, W along the outputs for dx, g and x along
the tokens for dW. An outlier thus costs precision in its own row alone. "Fast" sums skip the tensor cores' periodic carry into
fp32. Casts are ordinary tensor operations, so that a compiler fuses them with the norms and gates around them.

Sizes that are not multiples of 16, and every call without gradient (replay, validation), use the ordinary product.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

SCALINGS = ("tensor", "row")
VALUE = torch.float8_e4m3fn  # 3 bits of mantissa
SLOPE = {
    "tensor": torch.float8_e5m2,
    "row": torch.float8_e4m3fn,
}  # e5m2: 2 bits of mantissa, 2^15 times the range
LARGEST = {kind: torch.finfo(kind).max for kind in (torch.float8_e4m3fn, torch.float8_e5m2)}
FLOOR = 2.0**-100  # of a largest magnitude, so that rows of zeros have a scale
STEP = 16  # sizes of operands are multiples of this
CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def require_float8(device: torch.device, scaling: str) -> None:
    """Raises ValueError for an unknown `scaling`, and where `device` has no float8 products, naming it and the remedy."""
    if scaling not in SCALINGS:
        raise ValueError(f"float8 scaling is {scaling!r}; expected one of {SCALINGS}, or false for none.")
    remedy = "Set trainer.float8=false, or train on such a device."
    needs = "float8 products need a CUDA device of compute capability 8.9 or more (Ada, Hopper or newer)"
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"{needs}, but this would run on {device.type}. {remedy}")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{needs}, but {name} has {found[0]}.{found[1]}. {remedy}")


def use_float8(draft: nn.Module, *, scaling: str) -> None:
    """Let the projections of a draft's layers multiply in float8 when they train. Modules, parameters and names stay.

    Whether scaling and device will do is a question for `require_float8`.
    """
    for module in draft.layers.modules():
        if isinstance(module, nn.Linear) and module.bias is None:
            module.__class__ = Float8Linear
            module.scaling = scaling


class Float8Linear(nn.Linear):
    """A linear layer without bias whose three products are in float8 while it trains; see `use_float8`."""

    scaling: str

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        rows = x.numel() // x.shape[-1]
        fits = rows > 0 and all(size % STEP == 0 for size in (rows, *self.weight.shape))
        if not fits or not torch.is_grad_enabled():
            return super().forward(x)
        return _Product.apply(x.flatten(0, -2), self.weight, self.scaling).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    """x W^T and its gradients. Inputs are kept as they came: a compiler chooses better what to keep, and x is often kept anyway."""

    @staticmethod
    def forward(ctx, x, weight, scaling):
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        y = product(operand(x, 1, VALUE, scaling), operand(weight, 1, VALUE, scaling), fast=True)
        # A cast that changes nothing would return y under a second name, for which torch 2.11 compiles a gradient of zeros.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        slope, scaling = SLOPE[ctx.scaling], ctx.scaling
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            pair = operand(grad, 1, slope, scaling), operand(weight, 0, VALUE, scaling)
            grad_x = product(*pair, fast=False).to(x.dtype)
        if ctx.needs_input_grad[1]:
            pair = operand(grad, 0, slope, scaling), operand(x, 0, VALUE, scaling)
            grad_weight = product(*pair, fast=False).to(weight.dtype)
        return grad_x, grad_weight, None


def operand(
    x: Float[Tensor, "r c"], contracted: int, kind: torch.dtype, scaling: str
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m 1"] | Float[Tensor, ""]]:
    """`x` in float8 with the contracted dimension last and contiguous, and the fp32 scale that multiplies it back.

    Zeros stay zeros; a NaN or an infinity makes its row (or tensor) NaN, so that it is seen where gradients are checked.
    """
    size = x.abs()
    largest = size.amax() if scaling == "tensor" else size.amax(contracted, keepdim=True)
    scale = largest.float().clamp(min=FLOOR) / LARGEST[kind]
    values = (x.float() / scale).to(kind)
    if contracted == 0:
        values = values.T.contiguous()
    return values, scale if scaling == "tensor" else scale.view(-1, 1)


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, fast: bool) -> Float[Tensor, "m n"]:
    """a b^T in bf16 of two operands; `fast` sums without the carry into fp32."""
    (a_values, a_scale), (b_values, b_scale) = a, b
    return torch._scaled_mm(
        a_values,
        b_values.T,
        scale_a=a_scale,
        scale_b=b_scale if b_scale.ndim == 0 else b_scale.view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
