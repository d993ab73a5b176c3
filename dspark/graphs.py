"""Forward, loss and backward of a training step as one CUDA graph.

A step of a small draft launches a thousand kernels that each run for microseconds, so the host is what limits it. Recorded once
and replayed, they cost the host one call. What varies between steps is data: batches are copied into the recorded ones' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from dspark.blocks import DraftBatch
from dspark.objective import LossSums

WARM_UP = 3  # steps before recording, in which kernels are compiled and the allocator settles


class StepGraph:
    """Calls of `compute` on batches of one shape, replayed. The result's backward pass hands the gradients to `parameters`.

    `compute` must not wait for the device or depend on a batch's values on the host: `training_loss(..., static_shapes=True)`. A
    batch of another shape is recorded anew. The loss must be backpropagated as it is, or, with `accumulate` micro-batches a
    step, divided by their number; hooks on parameters, and with them other processes, never see its gradients. While a shape
    is recorded, no other autograd graph of the parameters may be alive: it would tie their gradients to another stream.
    """

    def __init__(
        self, compute: Callable[[DraftBatch], LossSums], parameters: Sequence[Tensor], *, accumulate: int
    ) -> None:
        self.compute, self.parameters, self.accumulate = compute, list(parameters), accumulate
        self.batch: DraftBatch | None = None
        self._leaf: Tensor | None = None

    def __call__(self, batch: DraftBatch) -> LossSums:
        if self.batch is None or _shapes(batch) != _shapes(self.batch):
            self._record(batch)
        for name, tensor in vars(batch).items():
            getattr(self.batch, name).copy_(tensor, non_blocking=True)
        self.graph.replay()
        # The next replay overwrites what this one computed.
        sums = replace(self.sums, **{f.name: getattr(self.sums, f.name).clone() for f in fields(LossSums)})
        sums.numerator = _Replayed.apply(sums.numerator, self._leaf, self)
        return sums

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

    def _record(self, batch: DraftBatch) -> None:
        self.batch = replace(batch, **{name: tensor.clone() for name, tensor in vars(batch).items()})
        self._leaf = torch.zeros((), device=batch.aux.device, requires_grad=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.sums, self.gradients = self._step()

    def _step(self) -> tuple[LossSums, list[Tensor | None]]:
        kind = torch.get_autocast_dtype("cuda")
        # A cast that autocast keeps from an earlier step would be a cast of the weights of then.
        with torch.autocast("cuda", kind, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            sums = self.compute(self.batch)
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
