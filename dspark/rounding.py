"""Rounding a draft's matrices so that what they do to their inputs changes little (GPTQ, arXiv:2210.17323).

Rounding entry by entry keeps every number close. What counts is W x: with the second moments H = sum x x^T of the inputs that a
matrix really sees, rounding W to V costs tr((V - W) H (V - W)^T). Columns are rounded one after another, and what the rounding of
one column does to the output is made up for, as well as it can be, by the columns that are still to come. The table of previous
tokens' embeddings has no input; its rows e act as logits W_2 e, and H is the covariance of W_2's rows under the draft's own
distribution q: e' in place of e changes q by (e' - e) H (e' - e)^T / 2 nats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from math import gcd

import torch
from jaxtyping import Float, Int16
from torch import Tensor, nn

from dspark.blocks import DraftBatch
from dspark.nn.draft import Draft

DAMPING = 0.01  # of the mean second moment, added to all: inputs that were hardly seen move little
BLOCK = 64  # columns whose effect on the rest is applied in one product
SPARSE = 8  # of about so many proposals, one counts in the moments of the table: each costs a softmax
LARGEST = 2**15 - 1  # code
ROWS = 1024  # whose softmaxes exist at once
TABLE, BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"

Rounder = Callable[[str, Tensor, Tensor], Tensor]


def round_jointly(
    weight: Float[Tensor, "M N"], scale: Float[Tensor, ...], moments: Float[Tensor, "N N"]
) -> Int16[Tensor, "M N"]:
    """Integers such that codes * scale, of `scale` [M, 1] or [1, N], times inputs with these moments is close to W x.

    Columns with much input are rounded first, so that most columns are left to make up for them. Entries whose scale is 0
    become 0. Raises ValueError where the moments are not finite.
    """
    if not bool(moments.isfinite().all()):
        raise ValueError(
            "the second moments of the inputs are not finite; leave out the batches that hold NaN."
        )
    order = moments.diagonal().argsort(descending=True)
    moments = moments[order][:, order].double()
    damped = moments + torch.eye(len(order), dtype=torch.float64) * max(
        DAMPING * float(moments.diagonal().mean()), 1e-12
    )
    # Row j of this factor says how an error in column j is best spread over the columns behind it.
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    left = weight.float()[:, order].clone()
    steps = scale.float().expand_as(weight)[:, order]
    codes = torch.zeros_like(left)
    for begin in range(0, len(order), BLOCK):
        block = slice(begin, min(begin + BLOCK, len(order)))
        errors = torch.zeros_like(left[:, block])
        for j in range(block.start, block.stop):
            step = steps[:, j]
            codes[:, j] = (left[:, j] / step.where(step > 0, torch.inf)).round().clamp(-LARGEST, LARGEST)
            error = (left[:, j] - codes[:, j] * step) / factor[j, j]
            left[:, j + 1 : block.stop] -= error.unsqueeze(1) * factor[j, j + 1 : block.stop]
            errors[:, j - begin] = error
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    return codes[:, order.argsort()].to(torch.int16)


def stages(draft: Draft) -> list[dict[str, nn.Linear]]:
    """The draft's matrices that have an input of numbers, by checkpoint name, in groups from input to output."""
    groups = [{"fc.weight": draft.fc}]
    for i, layer in enumerate(draft.layers):
        inside = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
        groups.append({f"layers.{i}.{name}.weight": module for name, module in inside.items()})
    if draft.markov_head is not None:
        groups.append({BIAS: draft.markov_head.markov_w2})
    return groups


@torch.no_grad()
def round_draft(draft: Draft, batches: Iterable[DraftBatch], round_one: Rounder) -> None:
    """Replace the draft's matrices, group by group and the table last, by what `round_one(name, weight, moments)` makes of them.

    The moments of a group are those of inputs that have passed the groups before it as they are then, already rounded.
    """
    batches = list(batches)
    for group in stages(draft):
        found = input_moments(draft, batches, group)
        for name, module in group.items():
            module.weight.copy_(round_one(name, module.weight, found[name]))
    if draft.config.head == "vanilla":  # other heads turn the table's rows into something else first
        table = draft.markov_head.markov_w1.weight
        table.copy_(round_one(TABLE, table, table_moments(draft, batches)))


@torch.no_grad()
def table_moments(draft: Draft, batches: Iterable[DraftBatch]) -> Float[Tensor, "R R"]:
    """Covariance of the rows of `markov_w2` under the draft's distribution, summed over some proposals of the batches.

    What a confidence head reads of the table is left out: its logits are one number beside the vocabulary's thousands.
    """
    rows = draft.markov_head.markov_w2.weight.float()
    rows = rows - rows.mean(0)  # which a softmax does not see, and a difference of large sums would
    proposals = draft.config.num_proposals
    every = next(n for n in count(SPARSE) if gcd(n, proposals) == 1)  # so that all positions have their turn
    found = torch.zeros(rows.shape[1], rows.shape[1])
    for batch in batches:
        output = draft(batch)
        hidden, features = (x.flatten(0, -2)[::every] for x in (output.hidden, output.features))
        for part in range(0, len(hidden), ROWS):
            q = draft.logits(hidden[part : part + ROWS], features[part : part + ROWS]).softmax(-1)
            means = q @ rows
            found += (rows.T * q.sum(0)) @ rows - means.T @ means
    return found * draft.config.logit_scale**2


@torch.no_grad()
def input_moments(
    draft: Draft, batches: Iterable[DraftBatch], modules: Mapping[str, nn.Linear]
) -> dict[str, Float[Tensor, "N N"]]:
    """Second moments, summed over rows in fp32, of what enters each module in the forward pass over the batches.

    A mask that the first layer projects once for all slots counts once for each.
    """
    found = {name: torch.zeros(m.in_features, m.in_features) for name, m in modules.items()}
    for batch in batches:
        masks = batch.anchors.numel() * (draft.config.block_size - 1)
        with _watched(modules, found, masks):
            output = draft(batch)
        head = draft.markov_head
        for name, module in modules.items():  # its product is part of the vocabulary's, not a call
            if head is not None and module is head.markov_w2 and output.features is not None:
                rows = output.features.flatten(0, -2).float()
                found[name] += rows.T @ rows
    return found


@contextmanager
def _watched(modules: Mapping[str, nn.Linear], found: dict[str, Tensor], masks: int):
    def add(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        found[name] += (masks if len(rows) == 1 else 1) * (rows.T @ rows)

    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
            hooks.callback(handle.remove)
        yield
