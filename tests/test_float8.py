"""float8 products: the same arithmetic written out, its error against fp32, awkward values, and a short training."""

from __future__ import annotations

import copy

import jaxtyping
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dspark.losses import LossWeights
from dspark.nn import float8
from dspark.nn.backbone import Attention, Layer, Rotary
from dspark.nn.float8 import (
    LARGEST,
    SCALINGS,
    SLOPE,
    VALUE,
    Float8Linear,
    operand,
    require_float8,
    use_float8,
)
from dspark.objective import draft_loss
from experiments.train import check_float8
from tests.builders import random_batch, random_draft

LOSS = LossWeights(
    terms={"ce": 0.1, "tv": 0.9},
    confidence=1.0,
    decay_gamma=4.0,
    ce_label="text",
    target_norm="verifier_vocab",
)
BATCH = {"anchors": 16, "rows": ((57, 20), (77,))}  # all numbers of rows are multiples of 16
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def dequantised(pair):
    values, scale = pair
    return values.float() * scale


def emulated_product(a, b, *, fast):
    return (dequantised(a) @ dequantised(b).T).bfloat16()


@pytest.fixture(autouse=True)
def a_product_everywhere(monkeypatch):
    """Where this torch has no float8 product on the CPU, the emulation stands in for it."""
    a = torch.ones(16, 16)
    try:
        for scaling in SCALINGS:
            for kind in SLOPE.values():
                float8.product(operand(a, 1, kind, scaling), operand(a, 0, VALUE, scaling), fast=False)
    except (RuntimeError, NotImplementedError):
        monkeypatch.setattr(float8, "product", emulated_product)


@pytest.fixture
def untyped():
    """Without the checks of annotations, which cannot be compiled; outside of tests there are none."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def problem(rows=64, n=96, m=48):
    """x with outlier rows, W, and a small upstream gradient whose rows differ in size, all seeded."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, n, generator=generator)
    x[[3, 40]] *= 30.0
    weight = torch.randn(m, n, generator=generator) * 0.05
    grad = torch.randn(rows, m, generator=generator) * torch.randn(rows, 1, generator=generator).exp() * 1e-6
    return x.bfloat16(), weight, grad.bfloat16()


def switched(weight, scaling):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    linear.__class__ = Float8Linear
    linear.scaling = scaling
    return linear


def products(linear, x, grad, call=None):
    """y, dx and dW in fp32."""
    x = x.clone().requires_grad_()
    y = (call or linear)(x)
    assert y.dtype == torch.bfloat16
    dx, dw = torch.autograd.grad(y, [x, linear.weight], grad)
    assert dw.dtype == torch.float32
    return [y.detach().float(), dx.float(), dw]


def relative_error(got, exact):
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", MANTISSA)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("contracted", [0, 1])
def test_an_operand_is_within_half_a_step_of_its_tensor(contracted, scaling, kind):
    x, _, _ = problem()
    values, scale = operand(x, contracted, kind, scaling)
    wanted = x.float() if contracted == 1 else x.float().T
    assert values.is_contiguous()
    assert values.dtype == kind
    assert scale.shape == ((len(wanted), 1) if scaling == "row" else ())
    assert (values.float().abs().amax(-1) == LARGEST[kind]).sum() == (len(wanted) if scaling == "row" else 1)
    half_step = 2.0 ** -(MANTISSA[kind] + 1) * wanted.abs() + 0.5 * scale * torch.finfo(kind).smallest_normal
    assert ((dequantised((values, scale)) - wanted).abs() <= half_step * 1.001).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_three_products_equal_the_arithmetic_written_out(scaling):
    x, weight, grad = problem()
    got = products(switched(weight, scaling), x, grad)
    e4m3 = torch.float8_e4m3fn
    slope = torch.float8_e5m2 if scaling == "tensor" else e4m3

    def rounded(values, kind, contracted):
        size = values.float().abs()
        largest = size.max() if scaling == "tensor" else size.amax(contracted, keepdim=True)
        scale = largest / torch.finfo(kind).max
        return (values.float() / scale).to(kind).float() * scale

    wanted = [
        rounded(x, e4m3, 1) @ rounded(weight, e4m3, 1).T,
        rounded(grad, slope, 1) @ rounded(weight, e4m3, 0),
        rounded(grad, slope, 0).T @ rounded(x, e4m3, 0),
    ]
    for ours, plain in zip(got, wanted, strict=True):  # differences are those of bf16
        torch.testing.assert_close(ours, plain, rtol=2**-8, atol=1e-5 * float(plain.abs().max()))


def test_error_against_fp32_is_that_of_the_formats():
    x, weight, grad = problem()
    exact = [x.float() @ weight.T, grad.float() @ weight, grad.float().T @ x.float()]
    bounds = {"tensor": (0.05, 0.08, 0.08), "row": (0.045, 0.045, 0.045)}
    for scaling, allowed in bounds.items():
        for got, wanted, bound in zip(
            products(switched(weight, scaling), x, grad), exact, allowed, strict=True
        ):
            assert 0.005 < relative_error(got, wanted) < bound, scaling


def test_with_row_scales_an_outlier_costs_its_own_row_alone():
    x, weight, grad = problem()
    x[3] *= 3e4
    others = torch.arange(len(x)) != 3
    exact = (x.float() @ weight.T)[others]
    by_row, by_tensor = (products(switched(weight, s), x, grad)[0][others] for s in ("row", "tensor"))
    assert relative_error(by_row, exact) < 0.045
    assert relative_error(by_tensor, exact) > 0.2


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(scaling):
    x, weight, grad = problem()
    x[5], weight[7], grad[9] = 0.0, 0.0, 0.0
    y, dx, dw = products(switched(weight, scaling), x, grad)
    for values in (y, dx, dw):
        assert values.isfinite().all()
    assert (y[5] == 0).all()
    assert (y[:, 7] == 0).all()
    assert (dx[9] == 0).all()
    for values in products(switched(weight, scaling), x, torch.zeros_like(grad))[1:]:
        assert (values == 0).all()
    for bad in (float("nan"), float("inf")):
        grad[2, 2] = bad
        _, dx, dw = products(switched(weight, scaling), x, grad)
        assert dx[2].isnan().any()
        assert dw[2].isnan().any()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_without_a_break_it_gives_the_same(scaling):
    x, weight, grad = problem()
    linear = switched(weight, scaling)
    call = torch.compile(lambda x: linear(x), fullgraph=True, dynamic=False, backend="aot_eager")
    for got, wanted in zip(products(linear, x, grad, call), products(linear, x, grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alike", [False, True])
def test_the_regions_of_a_layer_compile_without_a_break(scaling, alike):
    draft = random_draft()
    use_float8(draft, scaling=scaling)
    layer, x = draft.layers[0], torch.randn(2, 8, 4, 32, requires_grad=True)
    rotary = Rotary.at(torch.arange(64).view(2, 8, 4), 8, 100.0)

    def outputs(wrap):
        context = wrap(Attention.keys_values)(layer.self_attn, x, rotary)
        q, k, v = wrap(Layer.before_attention)(layer, x, rotary.cos, rotary.sin, 0, alike)
        out = wrap(Layer.after_attention)(layer, x, q)
        loss = sum(t.square().mean() for t in (out, k, v, *context))
        return [out, k, v, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    for got, wanted in zip(outputs(compiled), outputs(lambda f: f), strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


def test_switching_keeps_modules_parameters_and_names():
    draft = random_draft()
    before = dict(draft.named_parameters()), list(draft.state_dict()), dict(draft.named_modules())
    use_float8(draft, scaling="row")
    after = dict(draft.named_parameters()), list(draft.state_dict()), dict(draft.named_modules())
    assert before[1] == after[1]
    assert all(after[0][name] is parameter for name, parameter in before[0].items())
    assert all(after[2][name] is module for name, module in before[2].items())
    kinds = {name: type(module) for name, module in after[2].items() if isinstance(module, nn.Linear)}
    names = [name for name, kind in kinds.items() if kind is Float8Linear]
    assert len(names) == 7 * draft.config.num_layers
    assert all(name.startswith("layers.") for name in names)
    copied = copy.deepcopy(draft)
    batch = random_batch(draft.config, **BATCH)
    assert torch.equal(copied(batch).hidden, draft(batch).hidden)


def test_odd_sizes_and_calls_without_gradient_use_the_ordinary_product():
    x, weight, _ = problem()
    linear = switched(weight, "row")
    exact = x.float() @ weight.T
    with torch.no_grad():
        assert torch.equal(linear(x.float()), nn.functional.linear(x.float(), weight))
    assert torch.equal(linear(x.float()[:63]), nn.functional.linear(x.float()[:63], weight))
    assert torch.equal(linear(x.float()[:0]), exact[:0])
    assert relative_error(linear(x.float()).detach(), exact) > 0.005
    narrow = switched(weight[:, :90], "row")
    assert torch.equal(narrow(x.float()[:, :90]), nn.functional.linear(x.float()[:, :90], narrow.weight))


def trained_loss(draft, steps=30):
    """Loss before and after some steps of Adam on one batch, the latter without float8."""
    batch = random_batch(draft.config, head=draft.lm_head.new_zeros(97, 32).normal_(), **BATCH)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            output = draft(batch)
            sums = draft_loss(draft, output, batch, LOSS, confidence_detach_inputs=False, chunk_rows=256)
        return sums.numerator / sums.denominator

    first = float(loss().detach())
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    with torch.no_grad():
        return first, float(loss())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_short_training_reaches_the_loss_of_bf16(scaling):
    first, wanted = trained_loss(random_draft())
    draft = random_draft()
    use_float8(draft, scaling=scaling)
    _, reached = trained_loss(draft)
    assert wanted < 0.8 * first
    assert reached == pytest.approx(wanted, rel=0.02)


def test_recomputed_layers_have_the_same_gradients():
    batch, grads = None, []
    for recompute in (False, True):
        draft = random_draft()
        use_float8(draft, scaling="row")
        draft.checkpoint_layers = recompute
        batch = batch or random_batch(draft.config, **BATCH)
        draft(batch).hidden.square().sum().backward()
        grads.append({name: p.grad for name, p in draft.named_parameters() if p.grad is not None})
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected), name


def test_a_device_without_float8_is_refused_with_its_name(monkeypatch):
    with pytest.raises(ValueError, match=r"would run on cpu.*trainer.float8=false"):
        require_float8(torch.device("cpu"), "row")
    with pytest.raises(ValueError, match="scaling is 'column'; expected one of"):
        require_float8(torch.device("cpu"), "column")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"8\.9 or more.*Old GPU has 8\.0.*trainer.float8=false"):
        require_float8(torch.device("cuda"), "row")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_float8(torch.device("cuda"), "row")


def test_a_run_without_the_device_or_the_precision_ends_before_it_begins(monkeypatch):
    def check(**options):
        given = {"float8": "row", "precision": "auto", "compile": False, **options}
        check_float8(OmegaConf.create({"trainer": given}))

    check(float8=False, accelerator="cpu")
    with pytest.raises(ValueError, match="would run on cpu"):
        check(accelerator="cpu")
    with pytest.raises(ValueError, match="scaling is 'True'"):
        check(accelerator="gpu", float8=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check(accelerator="gpu")
    with pytest.raises(ValueError, match="would run on cpu"):
        check(accelerator="cpu")
    with pytest.raises(ValueError, match=r"trainer.precision is 32-true.*precision=bf16-mixed"):
        check(accelerator="gpu", precision="32-true")
    check(accelerator="gpu", compile=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_the_device_equal_the_emulation(scaling, monkeypatch):
    x, weight, grad = problem(rows=256, n=512, m=384)
    linear = switched(weight, scaling).cuda()
    call = torch.compile(lambda x: linear(x), fullgraph=True, dynamic=False)
    found = [products(linear, x.cuda(), grad.cuda(), form) for form in (None, call)]
    monkeypatch.setattr(float8, "product", emulated_product)
    wanted = products(switched(weight, scaling), x, grad)
    for got in found:
        for ours, plain in zip(got, wanted, strict=True):  # fast sums carry 14 bits
            torch.testing.assert_close(ours.cpu(), plain, rtol=2**-7, atol=2e-3 * float(plain.abs().max()))
