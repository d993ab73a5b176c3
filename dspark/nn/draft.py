"""The DSpark draft: backbone, sequential head and confidence head over a verifier's frozen embedding and head rows.

`forward` serves training and replay: all blocks of a batch at once, teacher-forced. `ContextCache`, `extend` and `draft_block`
serve decoding: context keys and values are computed once for each verified token, and a block attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.blocks import Blocks, DraftBatch, build_blocks, visible, visible_in_block
from dspark.config import Contract, DraftConfig
from dspark.losses import joint_head
from dspark.nn.attention import plan_attention
from dspark.nn.backbone import Attends, Attention, Layer, RMSNorm, Rotary, region
from dspark.nn.confidence import ConfidenceHead
from dspark.nn.heads import build_head
from dspark.vocab import VocabMap

WORD = 4  # columns of a matrix that are copied as 64-bit words come in multiples of this


@dataclass
class DraftOutput:
    """What a forward over blocks yields, in proposal space; logits are `[hidden ; features] @ [lm_head ; markov_w2].T`.

    `previous` is `markov_w1` of each proposal's previous token; it and `features` are None without a sequential head.
    """

    blocks: Blocks
    hidden: Float[Tensor, "B A N H"]
    previous: Float[Tensor, "B A N R"] | None
    features: Float[Tensor, "B A N R"] | None


class ContextCache:
    """Keys and values of verified context tokens for every layer, [B, T, g, d], with the number of tokens of each row."""

    def __init__(self, layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.lengths: Int[Tensor, " B"] | None = None

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keep only some rows of the batch, in the given order."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.lengths = self.lengths[rows]


class Draft(nn.Module):
    """Trainable: `fc`, `hidden_norm`, `layers`, `norm`, `markov_head`, `confidence_head`. Frozen: `embed_tokens`, `lm_head`.

    Frozen tensors are buffers, so no optimizer, gradient or weight decay can reach them. `embed_tokens` is not stored in
    checkpoints: it is the verifier's, and caches and verifiers both supply it.
    """

    def __init__(self, config: DraftConfig, *, attention_backend: str) -> None:
        super().__init__()
        self.config = config
        self.attention_backend = attention_backend
        self.compile_regions = True  # on CUDA, in training
        self.checkpoint_layers = False  # keep only the layers' inputs for the backward pass, and recompute
        self.fc = nn.Linear(config.hidden_size * len(config.aux_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = build_head(config)
        self.confidence_head = None
        if config.confidence:
            extra = config.markov_rank if config.confidence_uses_prev_embedding else 0
            self.confidence_head = ConfidenceHead(hidden_size=config.hidden_size, prev_embedding_size=extra)
        self.register_buffer(
            "embed_tokens", torch.zeros(config.vocab_size, config.hidden_size), persistent=False
        )
        self.register_buffer("lm_head", torch.zeros(config.draft_vocab_size, config.hidden_size))
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self._draft_ids: tuple[int, int, Tensor, Tensor] | None = None
        self._joint: Tensor | None = None

    def set_frozen(
        self,
        embed_tokens: Float[Tensor, "W H"],
        lm_head: Float[Tensor, "W H"],
        vocab: VocabMap,
        dtype: torch.dtype,
    ) -> None:
        """Adopt the verifier's embedding, the head rows of the kept vocabulary, and the vocabulary itself."""
        self.set_embedding(embed_tokens, dtype)
        if len(vocab) != self.config.draft_vocab_size or lm_head.shape != embed_tokens.shape:
            raise ValueError(
                f"vocabulary of {len(vocab)} tokens and head {tuple(lm_head.shape)} do not fit draft_vocab_size "
                f"{self.config.draft_vocab_size} and embedding {tuple(embed_tokens.shape)}."
            )
        device = self.fc.weight.device
        self.lm_head = lm_head[vocab.kept].to(device=device, dtype=dtype)
        self.kept_ids = vocab.kept.to(device)

    def set_embedding(self, embed_tokens: Float[Tensor, "W H"], dtype: torch.dtype) -> None:
        """Adopt the verifier's embedding rows, which checkpoints leave out."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(embed_tokens.shape) != expected:
            raise ValueError(
                f"verifier embedding is {tuple(embed_tokens.shape)}; the draft was configured for {expected}. "
                "Is this another verifier's cache?"
            )
        self.embed_tokens = embed_tokens.to(device=self.fc.weight.device, dtype=dtype)

    @property
    def vocab(self) -> VocabMap:
        return VocabMap(self.kept_ids, self.config.vocab_size)

    def to_draft_ids(self, ids: Int[Tensor, ...]) -> Int[Tensor, ...]:
        """Draft id of a verifier id; -1 where the draft cannot propose it. The table stays on the device between calls."""
        kept = self.kept_ids
        version = 0 if kept.is_inference() else kept._version
        if self._draft_ids is None or self._draft_ids[:2] != (id(kept), version):
            table = torch.full((self.config.vocab_size,), -1, dtype=torch.int64, device=kept.device)
            table[kept] = torch.arange(len(kept), device=kept.device)
            self._draft_ids = (
                id(kept),
                kept._version,
                table,
                kept,
            )  # holding `kept` keeps its id from being reused
        return self._draft_ids[2][ids]

    def joint_head(self, dtype: torch.dtype) -> Float[Tensor, "V J"]:
        """`[lm_head, markov_w2]`, whose product with `[hidden ; features]` is all logits; `lm_head` without a sequential head.

        The frozen rows live in the joint matrix from the first call on, so that a step copies `markov_w2` alone.
        """
        if self.markov_head is None:
            return self.lm_head.to(dtype)
        bias = self.markov_head.markov_w2.weight.detach()
        if self.lm_head.dtype != dtype:
            return joint_head(self.lm_head, bias, dtype)
        width = self.config.hidden_size
        if self._joint is None or self._joint.data_ptr() != self.lm_head.data_ptr():
            self._joint = joint_head(self.lm_head, bias, dtype)
            self.lm_head = self._joint[:, :width]
        place = self._joint[:, width:]
        # A GPU copies rows of a wider matrix number by number.
        if bias.dtype == dtype and not (width % WORD or bias.shape[1] % WORD):
            place, bias = place.view(torch.int64), bias.view(torch.int64)
        place.copy_(bias)
        return self._joint

    @property
    def contract(self) -> Contract:
        return Contract.of_draft(self.config, vocab_map_sha=self.vocab.sha)

    # ---- blocks in parallel: training and replay

    def forward(
        self, batch: DraftBatch, attention_backend: str | None = None, blocks: Blocks | None = None
    ) -> DraftOutput:
        """Hidden states and head features of every proposal of every block, conditioned on the text.

        `attention_backend` overrides the draft's own for this call. `blocks` are the batch's, where the caller has built them.
        """
        blocks = blocks or build_blocks(batch, self.config)
        # Replay, whose documents all have other lengths, runs without gradient: compiling for each would never end.
        compiled = self.compile_regions and batch.aux.is_cuda and torch.is_grad_enabled()
        context = self.context(batch.aux, compiled)
        rotary_context = self._rotary(batch.positions)
        rotary_block = self._rotary(blocks.slot_positions)
        windows = {layer.window for layer in self.layers}
        backend = attention_backend or self.attention_backend
        plans = plan_attention(batch, self.config.block_size, windows, backend)

        x = self._embed(blocks.slot_ids, context.dtype)  # [B, A, Q, H]
        last = len(self.layers) - 1
        apply = _apply_layer
        if self.checkpoint_layers and torch.is_grad_enabled():
            apply = partial(checkpoint, _apply_layer, use_reentrant=False, preserve_rng_state=False)
        for i, layer in enumerate(self.layers):
            rotaries, plan = (rotary_block, rotary_context), plans[layer.window]
            first_query = self.config.first_slot if i == last else 0
            alike = i == 0 and self.config.block_size > 1  # masks but for the anchor
            x = apply(layer, x, context, *rotaries, plan, first_query, alike, compiled)
        hidden = region(RMSNorm.forward, compiled)(self.norm, x)  # [B, A, N, H]
        previous = self.previous_embedding(blocks.prev_ids)
        features = None if previous is None else self.markov_head.block(previous, hidden)
        return DraftOutput(blocks=blocks, hidden=hidden, previous=previous, features=features)

    def previous_embedding(self, prev_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch R"] | None:
        """`markov_w1` rows of previous tokens (verifier ids), which the sequential and the confidence head both read."""
        if self.markov_head is None:
            return None
        return self.markov_head.markov_w1(
            prev_ids.int()
        )  # whose gradient sorts them: half the passes of int64

    def context(self, aux: Float[Tensor, "*batch L H"], compiled: bool = False) -> Float[Tensor, "*batch H"]:
        """H_ctx = RMSNorm(W_c [h^(l1); ...; h^(lm)]), taps in ascending layer order     (paper eq. 2)."""
        taps = aux.flatten(-2).to(self._input_dtype)
        return region(_normed_product, compiled)(self.fc, self.hidden_norm, taps)

    def confidence_logits(
        self, hidden: Float[Tensor, "*batch H"], previous: Float[Tensor, "*batch R"] | None
    ) -> Float[Tensor, "*batch"]:
        """Logit of `p_accept_given_prefix`, from the slot and the previous token's embedding     (paper eq. 7)."""
        return self.confidence_head(hidden, previous if self.config.confidence_uses_prev_embedding else None)

    def logits(
        self, hidden: Float[Tensor, "*batch H"], features: Float[Tensor, "*batch R"] | None
    ) -> Float[Tensor, "*batch V"]:
        """Draft logits in draft-vocabulary space, fp32. Only for few positions: training chunks this product instead."""
        logits = F.linear(hidden, self.lm_head.to(hidden.dtype)).float() * self.config.logit_scale
        return logits if features is None else logits + self.bias(features, hidden.dtype)

    def bias(self, features: Float[Tensor, "*batch R"], dtype: torch.dtype) -> Float[Tensor, "*batch V"]:
        """What the sequential head adds to the base logits, fp32, the product taken in `dtype`."""
        weight = self.markov_head.markov_w2.weight
        return F.linear(features.to(dtype), weight.to(dtype)).float() * self.config.logit_scale

    # ---- one block at a time: decoding

    def extend(
        self,
        cache: ContextCache,
        aux: Float[Tensor, "B T L H"],
        positions: Int[Tensor, "B T"],
        counts: Int[Tensor, " B"],
    ) -> None:
        """Append context keys and values of newly verified tokens; row b contributes its first `counts[b]` tokens.

        Positions continue from the row's length. Rows are ragged: entries beyond a row's length are masked out.
        """
        context = self.context(aux)
        rotary = self._rotary(positions)
        old = torch.zeros_like(counts) if cache.lengths is None else cache.lengths
        need = int((old + aux.shape[1]).max())
        row = torch.arange(len(counts), device=counts.device).unsqueeze(1)
        place = old.unsqueeze(1) + torch.arange(aux.shape[1], device=counts.device)
        for i, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(context, rotary)
            for store, new in ((cache.keys, keys), (cache.values, values)):
                if store[i] is None or store[i].shape[1] < need:
                    size = max(need, 2 * (0 if store[i] is None else store[i].shape[1]))
                    grown = new.new_zeros(new.shape[0], size, *new.shape[2:])
                    if store[i] is not None:
                        grown[:, : store[i].shape[1]] = store[i]
                    store[i] = grown
                store[i][row, place] = new
        cache.lengths = old + counts

    def draft_block(
        self, cache: ContextCache, anchor_ids: Int[Tensor, " B"], width: int
    ) -> Float[Tensor, "B N H"]:
        """Hidden states of the proposals of one block a row, anchored at the first position after its cached context.

        `width` is the number of slots; the trained `block_size` unless a study drafts fewer.
        """
        lengths = cache.lengths
        slot = torch.arange(width, device=anchor_ids.device)
        ids = torch.full((len(anchor_ids), width), self.config.mask_token_id, device=anchor_ids.device)
        ids[:, 0] = anchor_ids
        rotary = self._rotary((lengths.unsqueeze(1) + slot).unsqueeze(1))  # [B, 1, Q]
        x = self._embed(ids, self._input_dtype).unsqueeze(1)  # [B, 1, Q, H]
        longest = int(lengths.max())
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            plan = RaggedPlan(lengths, width, layer.window)
            keys_values = cache.keys[i][:, :longest], cache.values[i][:, :longest]
            first_query = self.config.first_slot if i == last else 0
            x = layer(x, rotary, keys_values, plan, first_query, alike=i == 0 and width > 1)
        return self.norm(x).squeeze(1)

    @property
    def _input_dtype(self) -> torch.dtype:
        kind = self.fc.weight.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.fc.weight.dtype

    def _embed(self, ids: Int[Tensor, ...], dtype: torch.dtype) -> Float[Tensor, "... H"]:
        return F.embedding(ids, self.embed_tokens).to(dtype)

    def _rotary(self, positions: Int[Tensor, ...]) -> Rotary:
        return Rotary.at(positions, self.config.head_dim, self.config.rope_theta)


def _apply_layer(
    layer: Layer,
    x: Float[Tensor, "B A Q H"],
    context: Float[Tensor, "B S H"],
    rotary_block: Rotary,
    rotary_context: Rotary,
    attention: Attends,
    first_query: int,
    alike: bool,
    compiled: bool,
) -> Float[Tensor, "B A q H"]:
    """One layer of a forward over blocks, its keys and values of the context included."""
    keys_values = region(Attention.keys_values, compiled)(layer.self_attn, context, rotary_context)
    return layer(x, rotary_block, keys_values, attention, first_query, alike, compiled)


def _normed_product(
    linear: nn.Linear, norm: RMSNorm, x: Float[Tensor, "*batch I"]
) -> Float[Tensor, "*batch O"]:
    return norm(linear(x))


@dataclass
class RaggedPlan:
    """Attention of one block a row to its first `lengths[b]` context tokens: the decode form."""

    lengths: Int[Tensor, " B"]
    width: int
    window: int | None

    def attend(
        self,
        q: Float[Tensor, "B 1 q h d"],
        k_context: Float[Tensor, "B T g d"],
        v_context: Float[Tensor, "B T g d"],
        k_block: Float[Tensor, "B 1 Q g d"],
        v_block: Float[Tensor, "B 1 Q g d"],
    ) -> Float[Tensor, "B 1 q h d"]:
        device = q.device
        slot = torch.arange(self.width - q.shape[2], self.width, device=device)
        key = torch.arange(k_context.shape[1], device=device)
        anchor = self.lengths[:, None, None]
        to_context = visible(
            anchor, slot[None, :, None], torch.zeros_like(anchor), key[None, None, :], self.window
        )
        own = visible_in_block(slot[:, None], torch.arange(self.width, device=device)[None, :], self.window)
        to_context = to_context.expand(len(q), len(slot), len(key))
        mask = torch.cat([to_context, own.expand(len(q), *own.shape)], dim=-1).unsqueeze(1)  # [B, 1, q, T+Q]
        k = torch.cat([k_context, k_block.squeeze(1)], dim=1).transpose(1, 2)
        v = torch.cat([v_context, v_block.squeeze(1)], dim=1).transpose(1, 2)
        share = q.shape[3] // k.shape[1]
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q.squeeze(1).transpose(1, 2), k, v, attn_mask=mask)
        return out.transpose(1, 2).unsqueeze(1)
