"""bf16 weights and gradients beside an optimizer that keeps the weights in fp32, its masters.

Mixed precision keeps fp32 weights and casts them in every forward and backward pass. Here the cast happens once a step, after the
update: `round_matrices` turns the weights that matrix products read into bf16, and `MasterAdamW` updates their fp32 originals and
rounds them back. All else stays in fp32: norms, biases, the embedding of previous tokens (its rows are sums over a batch), and the
confidence head.

A trained weight takes 16 bytes, as in mixed precision: 2 itself, 2 its gradient, 4 its master, 8 its moments. The price is that
gradients are rounded to bf16 where they are added up, over the micro-batches of a step and over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dspark.nn.draft import Draft

PART = 1 << 26  # weights whose gradients exist in fp32 at once
EPS = 1e-8


@torch.no_grad()
def round_matrices(draft: Draft) -> dict[nn.Parameter, Tensor]:
    """Round the weights of all linear layers but the confidence head's to bf16, in place; returns them as they were, in fp32.

    A draft of such weights computes under autocast to bf16 only.
    """
    masters = {}
    for name, module in draft.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("confidence_head."):
            masters[module.weight] = module.weight.detach().float()
            module.weight.data = module.weight.to(torch.bfloat16)
    return masters


class MasterAdamW(torch.optim.Optimizer):
    """AdamW whose state holds an fp32 master of every parameter in `masters`; other parameters are updated themselves.

    A master and its moments are what AdamW would make of an fp32 parameter with the same gradients. They are part of
    `state_dict`, so that a resumed run goes on exactly.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        masters: Mapping[nn.Parameter, Tensor],
        betas: tuple[float, float],
    ) -> None:
        """`groups` name `params`, `lr` and `weight_decay`, on the device where they train; `masters` come from `round_matrices`."""
        super().__init__(groups, {"betas": betas})
        for parameter in self._parameters():
            kind = {"dtype": torch.float32, "device": parameter.device}
            state = self.state[parameter]
            state["step"] = torch.zeros((), **kind)
            state["exp_avg"] = torch.zeros(parameter.shape, **kind)
            state["exp_avg_sq"] = torch.zeros(parameter.shape, **kind)
            if parameter in masters:
                state["master"] = masters[parameter].to(**kind)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 values of a parameter: its master, or itself where it has none."""
        return self.state[parameter].get("master", parameter.detach())

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
        rounded = [p for p in parameters if "master" in self.state[p]]
        plain = [p for p in parameters if "master" not in self.state[p]]
        masters = [self.state[p]["master"] for p in rounded]
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
        if rounded:
            torch._foreach_copy_(rounded, masters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, in fp32 (torch would cast the state to the parameters' dtype), and round the masters.

        Raises ValueError for the state of an optimizer without masters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(self._parameters(), numbers, strict=True):
            saved = state_dict["state"][number]
            if ("master" in saved) != (parameter.dtype != torch.float32):
                raise ValueError(
                    f"the saved optimizer state has masters for other parameters than this optimizer's (parameter {number}, "
                    f"{parameter.dtype}): it belongs to another trainer.precision. Resume with the precision it was saved in."
                )
            self.state[parameter] = {
                name: value.to(device=parameter.device, dtype=torch.float32, copy=True)
                for name, value in saved.items()
            }
            parameter.copy_(self.master(parameter))

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


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
