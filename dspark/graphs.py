"""Forward, loss and backward of a training step as a CUDA graph, behind another that plans its loss.

A step of a small draft launches a thousand kernels that each run for microseconds, so the host is what limits it. Recorded once
and replayed, they cost the host two calls. What varies between steps is data: batches are copied into the recorded ones' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from dspark.blocks import Blocks, DraftBatch
from dspark.losses import Part, PartPlan, PartSizes
from dspark.objective import LossSums, Planned

WARM_UP = 3  # steps before recording, in which kernels are compiled and the allocator settles
ROOM = 128  # numbers of rows and positions are rounded up to multiples of this, so that few batches need more than those before


class StepGraph:
    """Calls of `compute` on batches of one shape, replayed. The result's backward pass hands the gradients to `parameters`.

    `compute` must not wait for the device or depend on a batch's values on the host. What the loss needs to know of them are the
    blocks and the parts of their rows, which `plan` works out: a graph of its own, because the host checks, while the step is
    under way, that no part needed more room than was recorded. A batch that does, or has another shape, is recorded anew. The
    loss must be backpropagated as it is, or, with `accumulate` micro-batches a step, divided by their number; hooks on
    parameters, and with them other processes, never see its gradients. While a shape is recorded, no other autograd graph of the
    parameters may be alive: it would tie their gradients to another stream.
    """

    def __init__(
        self,
        plan: Callable[[DraftBatch], tuple[Blocks, PartPlan]],
        compute: Callable[[DraftBatch, Planned], LossSums],
        parameters: Sequence[Tensor],
        *,
        accumulate: int,
    ) -> None:
        self.plan, self.compute = plan, compute
        self.parameters, self.accumulate = list(parameters), accumulate
        self.batch: DraftBatch | None = None
        self.recordings = 0
        self._leaf: Tensor | None = None

    def __call__(self, batch: DraftBatch) -> LossSums:
        if self.batch is None or _shapes(batch) != _shapes(self.batch):
            needed = self.plan(batch)[1].sizes()
            self._record(batch, needed.grown(needed, ROOM))
        needed = self._replay(batch)
        if not self.sizes.hold(needed):
            self._record(batch, self.sizes.grown(needed, ROOM))
            self._replay(batch)
        # The next replay overwrites what this one computed.
        sums = replace(self.sums, **{f.name: getattr(self.sums, f.name).clone() for f in fields(LossSums)})
        sums.numerator = _Replayed.apply(sums.numerator, self._leaf, self)
        return sums

    def _replay(self, batch: DraftBatch) -> PartSizes:
        """Queue the step on the batch. Returns the sizes that its parts need, without waiting for its end."""
        for name, tensor in vars(batch).items():
            getattr(self.batch, name).copy_(tensor, non_blocking=True)
        self.planning.replay()
        known = torch.cuda.Event()
        known.record()
        self.step.replay()
        known.synchronize()
        plan, *_ = self._planned
        return plan.sizes_of(self._numbers)

    def hand_over(self) -> None:
        """Add the gradients of the last replay to the parameters', or make them theirs where a step has no other replay."""
        known = [(p, g) for p, g in zip(self.parameters, self.gradients, strict=True) if g is not None]
        if self.accumulate == 1:
            for parameter, gradient in known:
                parameter.grad = gradient
            return
        for parameter, gradient in known:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(gradient)
        torch._foreach_add_([p.grad for p, _ in known], [g for _, g in known], alpha=1.0 / self.accumulate)

    def _record(self, batch: DraftBatch, sizes: PartSizes) -> None:
        # What an earlier recording holds can go, but for gradients that are still in use.
        self.planning = self.step = self.sums = self.gradients = self._planned = None
        self.batch = replace(batch, **{name: tensor.clone() for name, tensor in vars(batch).items()})
        self.sizes = sizes
        self.recordings += 1
        self._leaf = torch.zeros((), device=batch.aux.device, requires_grad=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                blocks, plan = self.plan(self.batch)
                self._step(blocks, plan.parts(sizes))
        torch.cuda.current_stream().wait_stream(stream)
        self._numbers = torch.empty(plan.numbers.shape, dtype=plan.numbers.dtype, pin_memory=True)
        self.planning, self.step = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.planning):
            blocks, plan = self.plan(self.batch)
            parts = plan.parts(sizes)
            self._numbers.copy_(plan.numbers, non_blocking=True)
        # Kept, because the second graph reads what the first writes: nothing else may take its place.
        self._planned = plan, blocks, parts
        with torch.cuda.graph(self.step, pool=self.planning.pool()):
            self.sums, self.gradients = self._step(blocks, parts)

    def _step(self, blocks: Blocks, parts: list[Part]) -> tuple[LossSums, list[Tensor | None]]:
        kind = torch.get_autocast_dtype("cuda")
        # A cast that autocast keeps from an earlier step would be a cast of the weights of then.
        with torch.autocast("cuda", kind, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            sums = self.compute(self.batch, (blocks, lambda: parts))
        gradients = torch.autograd.grad(sums.numerator, self.parameters, allow_unused=True)
        sums.numerator = sums.numerator.detach()
        return sums, list(gradients)


class _Replayed(torch.autograd.Function):
    """A loss whose gradients exist already; `leaf` stands for the parameters, so that autograd has something to go back to."""

    @staticmethod
    def forward(ctx, value, leaf, graph):
        ctx.graph = graph
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.graph.hand_over()
        return None, None, None


def _shapes(batch: DraftBatch) -> list[torch.Size]:
    return [tensor.shape for tensor in vars(batch).values()]
