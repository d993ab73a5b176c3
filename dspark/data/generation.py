"""Batched generation from the verifier: greedy or sampled, each row independent of the batch it happens to be in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dspark.verifier import Verifier

# New tokens a row up to which grouped attention beats the fused kernel on a CPU.
FEW_TOKENS = 16

# Share of a batch that may have finished before its rows are dropped. Dropping copies all keys and values, which costs a GPU more
# than a step of idle rows; a CPU pays for every row.
IDLE_SHARE = {"cpu": 0.0, "cuda": 1 / 8}

# Finite, so that queries of padding, which see nothing, stay finite too.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to generate. `seed` makes a sampled row independent of the batch it happens to be in."""

    prompt_ids: Sequence[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Response:
    """Generated token ids, the end-of-turn token included when `finish_reason` is "stop" ("length" otherwise)."""

    token_ids: list[int]
    finish_reason: str


@torch.inference_mode()
def generate(
    verifier: Verifier, requests: Sequence[Request], *, max_new_tokens: int, batch_size: int
) -> Iterator[tuple[int, Response]]:
    """Yield (index of the request, its response) in order of completion.

    Requests of similar prompt length share a batch; finished rows leave it, on a GPU some at a time (`IDLE_SHARE`). Temperature
    0 takes the arg max; otherwise one uniform number a token, from the row's own generator, picks from the fp32 distribution by
    its cumulative sum.
    """
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), i))
    for start in range(0, len(order), batch_size):
        with fast_attention(verifier):
            yield from _generate_batch(verifier, requests, order[start : start + batch_size], max_new_tokens)


def _generate_batch(
    verifier: Verifier, requests: Sequence[Request], rows: list[int], max_new_tokens: int
) -> Iterator[tuple[int, Response]]:
    device, stop = verifier.device, set(verifier.info.eos_token_ids)
    longest = max(len(requests[r].prompt_ids) for r in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for b, r in enumerate(rows):
        prompt = torch.as_tensor(list(requests[r].prompt_ids))
        ids[b, longest - len(prompt) :], mask[b, longest - len(prompt) :] = prompt, 1
    ids, mask = ids.to(device), mask.to(device)
    temperatures = torch.tensor([requests[r].temperature for r in rows])
    draws = torch.stack([_uniform(requests[r], max_new_tokens) for r in rows])
    texts: list[list[int]] = [[] for _ in rows]
    going = [True] * len(rows)
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for step in range(max_new_tokens):
        hidden = verifier.decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        tokens = pick_tokens(verifier.next_logits(hidden), temperatures, draws[:, step])
        for b, token in enumerate(tokens.tolist()):
            if going[b]:
                texts[b].append(token)
                if token in stop or step + 1 == max_new_tokens:
                    going[b] = False
                    yield rows[b], Response(texts[b], "stop" if token in stop else "length")
        if not any(going):
            return
        tokens = tokens.to(device)
        if going.count(False) > IDLE_SHARE.get(device.type, 0.0) * len(rows):
            left = [b for b, goes_on in enumerate(going) if goes_on]
            rows, texts, going = [rows[b] for b in left], [texts[b] for b in left], [True] * len(left)
            temperatures, draws = temperatures[left], draws[left]
            keep = torch.tensor(left, device=device)
            cache.batch_select_indices(keep)
            tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
        ids = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        positions = positions[:, -1:] + 1


def _uniform(request: Request, count: int) -> Tensor:
    """The row's own numbers in [0, 1), fp64; a greedy row uses none."""
    if not request.temperature > 0:
        return torch.zeros(count, dtype=torch.float64)
    return torch.rand(count, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)


def pick_tokens(logits: Tensor, temperatures: Tensor, draws: Tensor) -> Tensor:
    """Token ids [B] from fp32 logits [B, W]: arg max where temperature is 0, else the inverse CDF at `draws` in [0, 1)."""
    tokens = logits.argmax(-1).cpu()
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        scaled = (
            logits[warm.to(logits.device)].float() / temperatures[warm].to(logits.device)[:, None].float()
        )
        cumulative = scaled.softmax(-1).double().cumsum(-1)
        target = draws[warm].to(logits.device)[:, None] * cumulative[:, -1:]
        picked = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
        tokens[warm] = picked.cpu()
    return tokens


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow, so that a new token copies itself and nothing else."""

    room = 128

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers: list[Tensor] = []
        used = self.keys.shape[-2] if self.keys.dim() == 4 else 0
        total = used + key_states.shape[-2]
        if not self.buffers or total > self.buffers[0].shape[-2]:
            grown = []
            for old, new in ((self.keys, key_states), (self.values, value_states)):
                batch, heads, _, width = new.shape
                buffer = new.new_empty(batch, heads, total + self.room, width)
                if used:
                    buffer[:, :, :used] = old
                grown.append(buffer)
            self.buffers = grown
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, used:total] = new
        self.keys, self.values = (buffer[:, :, :total] for buffer in self.buffers)
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold other keys and values from here on, for example a rearrangement of the present ones."""
        self.keys, self.values, self.buffers = keys, values, [keys, values]

    def batch_select_indices(self, indices: Tensor) -> None:
        total = self.keys.shape[-2]
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, :total] for buffer in self.buffers)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of few new tokens per row without repeating keys for the query heads that share them."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    unmasked = attention_mask is None and length > 1  # causal by a flag: nothing here to read it from
    if length > FEW_TOKENS or unmasked or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    share = heads // groups
    grouped = query.reshape(batch, groups, share * length, width)
    scores = (grouped @ key.transpose(-1, -2)).float() * (scaling if scaling is not None else width**-0.5)
    if attention_mask is not None:
        scores = scores.view(batch, groups, share, length, -1)
        scores = scores.masked_fill(~attention_mask.unsqueeze(2), LOWEST).flatten(2, 3)
    mixed = scores.softmax(-1).to(value.dtype) @ value
    return mixed.reshape(batch, heads, length, width).transpose(1, 2), None


AttentionInterface.register("dspark_grouped", _grouped_attention)
AttentionMaskInterface.register("dspark_grouped", sdpa_mask)


@contextlib.contextmanager
def fast_attention(verifier: Verifier) -> Iterator[None]:
    before = verifier.model.config._attn_implementation
    if before != "sdpa":
        yield
        return
    verifier.model.set_attn_implementation("dspark_grouped")
    try:
        yield
    finally:
        verifier.model.set_attn_implementation(before)
