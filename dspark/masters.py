"""bf16 weights and gradients beside an optimizer that keeps the weights in fp32, its masters.

Mixed precision keeps fp32 weights and casts them in every forward and backward pass. Here the cast happens once a step, after the
update: `round_matrices` turns the weights that matrix products read into bf16, and `MasterAdamW` updates their fp32 originals and
rounds them again. All else stays in fp32: norms, biases, the embedding of previous tokens (its rows are sums over a batch), and the
confidence head.

A master is not kept beside its weight, which is half of it already: the two differ by at most half a step of bf16, which is 2^15
steps of fp32, so 16 bits hold the rest exactly. A trained weight thus takes 14 bytes, where mixed precision takes 16: 2 itself, 2 its
gradient, 2 the rest, 8 its moments. The price is that gradients are rounded to bf16 where they are added up, over the micro-batches
of a step and over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import BFloat16, Float, Int16
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dspark.nn.draft import Draft

PART = 1 << 26  # weights whose masters and gradients exist in fp32 at once
EPS = 1e-8


def split(master: Float[Tensor, "*shape"]) -> tuple[BFloat16[Tensor, "*shape"], Int16[Tensor, "*shape"]]:
    """An fp32 tensor rounded to bf16, and what that leaves: `joined` gives back every bit. Between two bf16, up in magnitude."""
    rounded = master.bfloat16().view(torch.int16)
    rest = master.view(torch.int32) - (rounded.int() << 16)
    up = (rest == 1 << 15).int()  # halfway and rounded down, to an even number: one more than 16 bits hold
    return (rounded + up.short()).view(torch.bfloat16), (rest - (up << 16)).short()


def joined(rounded: BFloat16[Tensor, "*shape"], rest: Int16[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The fp32 tensor that `split` took apart."""
    return ((rounded.view(torch.int16).int() << 16) + rest).view(torch.float32)


@torch.no_grad()
def round_matrices(draft: Draft) -> dict[nn.Parameter, Int16[Tensor, "M N"]]:
    """Round the weights of all linear layers but the confidence head's to bf16, in place; returns the rest of each (`split`).

    A draft of such weights computes under autocast to bf16 only.
    """
    rests = {}
    for name, module in draft.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("confidence_head."):
            module.weight.data, rests[module.weight] = split(module.weight.detach().float())
    return rests


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on fp32 masters, whose state holds what the bf16 parameters in `rests` lack of them; others are updated themselves.

    A master and its moments are what AdamW would make of an fp32 parameter with the same gradients. With the parameters,
    `state_dict` has all of it, so that a resumed run goes on exactly.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        rests: Mapping[nn.Parameter, Int16[Tensor, "M N"]],
        betas: tuple[float, float],
    ) -> None:
        """`groups` name `params`, `lr` and `weight_decay`, on the device where they train; `rests` come from `round_matrices`."""
        super().__init__(groups, {"betas": betas})
        for parameter in self._parameters():
            kind = {"dtype": torch.float32, "device": parameter.device}
            state = self.state[parameter]
            state["step"] = torch.zeros((), **kind)
            state["exp_avg"] = torch.zeros(parameter.shape, **kind)
            state["exp_avg_sq"] = torch.zeros(parameter.shape, **kind)
            if parameter in rests:
                state["rest"] = rests[parameter].to(parameter.device)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 values of a parameter: its master, made anew, or itself where it has none."""
        rest = self.state[parameter].get("rest")
        if rest is None:
            return parameter.detach()
        return _one_pass(joined, rest.is_cuda)(parameter.detach(), rest)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for part in _parts([p for p in group["params"] if p.grad is not None]):
                self._update(part, group)
        return loss

    def _update(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        rounded = [p for p in parameters if "rest" in self.state[p]]
        plain = [p for p in parameters if "rest" not in self.state[p]]
        masters = [self.master(p) for p in rounded]
        gradients = [torch.empty_like(master) for master in masters]
        if rounded:
            torch._foreach_copy_(gradients, [p.grad for p in rounded])
        moments = [self.state[p] for p in rounded + plain]
        adamw(
            masters + plain,
            gradients + [p.grad for p in plain],
            [m["exp_avg"] for m in moments],
            [m["exp_avg_sq"] for m in moments],
            [],
            [m["step"] for m in moments],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPS,
            maximize=False,
        )
        for parameter, master in zip(rounded, masters, strict=True):
            weight, self.state[parameter]["rest"] = _one_pass(split, master.is_cuda)(master)
            parameter.copy_(weight)

    def broadcast(self, source: int) -> None:
        """Take over a process's masters, where the parameters are that process's already: DDP sends those itself."""
        for state in self.state.values():
            if "rest" in state:
                torch.distributed.broadcast(state["rest"].view(torch.uint8), source)  # NCCL has no int16

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state as they are (torch would cast the state to the parameters' dtype).

        A state with whole masters, as version 0.1.0 first wrote them, is split, and its parameters with it.
        Raises ValueError for the state of an optimizer without masters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(self._parameters(), numbers, strict=True):
            saved = dict(state_dict["state"][number])
            if "master" in saved:
                weight, saved["rest"] = split(saved.pop("master").float())
                parameter.copy_(weight)
            if ("rest" in saved) != (parameter.dtype != torch.float32):
                raise ValueError(
                    f"the saved optimizer state has masters for other parameters than this optimizer's (parameter {number}, "
                    f"{parameter.dtype}): it belongs to another trainer.precision. Resume with the precision it was saved in."
                )
            self.state[parameter] = {
                name: value.to(parameter.device, torch.int16 if name == "rest" else torch.float32, copy=True)
                for name, value in saved.items()
            }

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


@cache
def _one_pass(function: Callable, compiled: bool) -> Callable:
    """`function`, or its compiled form: one pass over memory where each operation takes one."""
    return torch.compile(function, dynamic=True, fullgraph=True) if compiled else function


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, up to `PART` weights at a time."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if part and sum(p.numel() for p in part) + parameter.numel() > PART:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
