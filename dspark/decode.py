"""The real loop: draft a block, let the verifier check it in one pass, keep what it would have said itself.

One round starts at the anchor `a`, the newest known token, whose hidden state does not exist yet. The draft proposes tokens
for a+1 .. a+n; the verifier reads [anchor, drafts] at a .. a+n on top of its key-value cache; m drafts are kept; the token
at a+m+1 is the verifier's own. The aux states of a .. a+m join the draft's context, everything later is dropped from
both caches.

temperature 0   keep drafts while they equal the verifier's arg max: the text is the verifier's greedy text.
temperature > 0 keep draft d with probability min(1, p(d) / q(d)), else draw from the residual max(p - q, 0); the text is a
                sample from the verifier. p and q are the very fp32 tensors that drafts and residuals are drawn from. A
                greedy draft is the q that puts everything on one token; tokens that the draft vocabulary lacks have q = 0.

Rows of a batch keep their own length: rejected columns of the verifier's cache are masked, and squeezed out when they pile
up. Position ids count a row's real tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from dspark.data.generation import GrowingLayer, Request, Response, fast_attention
from dspark.nn.draft import ContextCache, Draft
from dspark.replay import check_proposals
from dspark.verifier import Verifier

# Masked columns a batch may carry before its cache is squeezed.
MAX_HOLES = 32


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How to draft and how the verifier samples; `top_k` 0 and `top_p` 1 leave its distribution whole.

    `confidence_threshold` cuts a block at the first proposal whose confidence is below it.
    """

    draft_sampling: str
    num_proposals: int
    confidence_threshold: float | None
    top_k: int
    top_p: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"top_k is {self.top_k} and top_p {self.top_p}; expected top_k >= 0 and 0 < top_p <= 1."
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1.")


@dataclass
class Round:
    """One verifier pass of one request. A prefill is a round without proposals that emits the first token.

    `anchor` is a token index in the request's document (its prompt, then its text). `tokens` were emitted inside the text,
    the `accepted` kept drafts first. Times are this row's share of its batch's. `slots` maps the names of the slot table to
    one value a proposal; None unless diagnostics were asked for, and for prefills.
    """

    request: int
    anchor: int
    prefill: bool
    proposed: int
    accepted: int
    tokens: list[int]
    finish_reason: str | None
    draft_ms: float
    verify_ms: float
    slots: dict[str, list[float]] | None


def decode(
    verifier: Verifier,
    draft: Draft,
    requests: Sequence[Request],
    *,
    settings: DecodeSettings,
    batch_size: int,
    diagnostics: bool,
    limits: Sequence[int] | None = None,
) -> Iterator[Round]:
    """Answer `requests` speculatively; yields every round of every request, those of one request in order.

    Requests of one temperature and similar length share a batch; finished rows leave it. A request's seed decides its draws
    whatever the batch. `diagnostics` records slot values, outside the measured times. `limits` are each request's own most
    tokens, in place of `settings.max_new_tokens`.

    Raises ValueError for an empty prompt, a draft of another geometry, or settings that `check_proposals` refuses.
    """
    for temperature in sorted({r.temperature for r in requests}):
        check_proposals(
            draft,
            settings.draft_sampling if temperature > 0 else "greedy",
            temperature,
            settings.num_proposals,
            settings.confidence_threshold,
        )
    config = draft.config
    if (config.hidden_size, config.vocab_size) != (verifier.info.hidden_size, verifier.info.vocab_size):
        raise ValueError(
            f"the draft expects a verifier of hidden size {config.hidden_size} and {config.vocab_size} embedding rows; "
            f"{verifier.info.name} has {verifier.info.hidden_size} and {verifier.info.vocab_size}."
        )
    empty = [i for i, r in enumerate(requests) if len(r.prompt_ids) == 0]
    if empty:
        raise ValueError(f"request {empty[0]} has an empty prompt; there is nothing to decode from.")
    order = sorted(
        range(len(requests)), key=lambda i: (requests[i].temperature, len(requests[i].prompt_ids), i)
    )
    rows: list[int] = []
    for place, i in enumerate(order):
        rows.append(i)
        following = order[place + 1] if place + 1 < len(order) else None
        if (
            following is None
            or len(rows) == batch_size
            or requests[following].temperature != requests[i].temperature
        ):
            room = {r: settings.max_new_tokens if limits is None else limits[r] for r in rows}
            yield from _decode_batch(verifier, draft, requests, room, settings, diagnostics)
            rows = []


@torch.inference_mode()
def _decode_batch(
    verifier: Verifier,
    draft: Draft,
    requests: Sequence[Request],
    room: dict[int, int],
    settings: DecodeSettings,
    diagnostics: bool,
) -> Iterator[Round]:
    with fast_attention(verifier):
        batch = _Batch(verifier, draft, requests, room, settings, diagnostics)
        yield from batch.prefill()
        while batch.rows:
            yield from batch.round()


def responses(rounds: Iterator[Round]) -> Iterator[tuple[int, Response]]:
    """(request, its whole response) as requests finish."""
    texts: dict[int, list[int]] = {}
    for step in rounds:
        texts.setdefault(step.request, []).extend(step.tokens)
        if step.finish_reason:
            yield step.request, Response(texts.pop(step.request), step.finish_reason)


class _Batch:
    """Requests decoded together: both caches, and the state of each row."""

    def __init__(
        self,
        verifier: Verifier,
        draft: Draft,
        requests: Sequence[Request],
        room: dict[int, int],
        settings: DecodeSettings,
        diagnostics: bool,
    ) -> None:
        """`room` maps the requests of this batch to how many tokens each may emit."""
        self.verifier, self.draft, self.settings, self.diagnostics = verifier, draft, settings, diagnostics
        self.requests, self.rows, self.room = requests, list(room), dict(room)
        rows = self.rows
        self.temperature = requests[rows[0]].temperature
        self.sampled = self.temperature > 0 and settings.draft_sampling == "sampled"
        self.device = verifier.device
        self.kept_ids = draft.kept_ids.to(self.device)
        self.stop = set(verifier.info.eos_token_ids)
        self.generators = {r: torch.Generator().manual_seed(requests[r].seed) for r in rows}
        self.cache = Cache(layer_class_to_replicate=GrowingLayer)
        self.context = ContextCache(len(draft.layers))
        # Key columns by row that hold a real token; None while all do.
        self.mask: Bool[Tensor, "B T"] | None = None
        self.lengths = torch.tensor([len(requests[r].prompt_ids) for r in rows], device=self.device)
        self.anchors = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        self.sliding = any(
            kind != "full_attention" for kind in getattr(verifier.text_config, "layer_types", None) or ()
        )

    # ---- passes of the verifier

    def _forward(self, ids: Int[Tensor, "B T"], positions: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """Last hidden states [B, T, H] and the aux states [B, T, L, H], rounded to bf16 as a cache stores them."""
        states: dict[int, Tensor] = {}

        def keep(layer_id: int) -> Callable[..., None]:
            def hook(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
                states[layer_id] = output if isinstance(output, Tensor) else output[0]

            return hook

        layers, ids_of_aux = self.verifier.decoder.layers, self.draft.config.aux_layer_ids
        with contextlib.ExitStack() as stack:
            for (
                layer_id
            ) in ids_of_aux:  # id i is what layer i - 1, counted from zero, leaves on the residual stream
                stack.callback(layers[layer_id - 1].register_forward_hook(keep(layer_id)).remove)
            hidden = self.verifier.decoder(
                input_ids=ids,
                attention_mask=None if self.mask is None else self.mask.long(),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return hidden, torch.stack([states[i].to(torch.bfloat16) for i in ids_of_aux], dim=2)

    def prefill(self) -> Iterator[Round]:
        """Read the prompts, padded on the left; emit each row's first token."""
        began = self._now()
        longest = int(self.lengths.max())
        ids = torch.zeros(len(self.rows), longest, dtype=torch.int64)
        for b, r in enumerate(self.rows):
            prompt = torch.as_tensor(list(self.requests[r].prompt_ids))
            ids[b, longest - len(prompt) :] = prompt
        column = torch.arange(longest, device=self.device)
        real = column >= longest - self.lengths.unsqueeze(1)
        self.mask = None if bool(real.all()) else real
        positions = (real.cumsum(-1) - 1).clamp_min(0)
        hidden, aux = self._forward(ids.to(self.device), positions)
        p = self._distribution(self.verifier.next_logits(hidden[:, -1]))
        first = p.argmax(-1) if self.temperature == 0 else draw(p, self._uniforms(1)[:, 0])
        verified = self._now()
        # Context rows start at the left: shift each row's aux states by its padding.
        shift = (longest - self.lengths).unsqueeze(1)
        place = (column + shift).clamp_max(longest - 1)
        aux = aux.gather(1, place[:, :, None, None].expand(-1, -1, *aux.shape[2:]))
        self.draft.extend(self.context, aux, column.expand(len(self.rows), -1), self.lengths)
        drafted = self._now()
        nothing = torch.zeros_like(self.lengths)
        yield from self._emit(
            first.unsqueeze(1)[:, :0],
            nothing,
            nothing,
            first,
            (drafted - verified, verified - began),
            None,
            prefill=True,
        )

    def round(self) -> Iterator[Round]:
        """Draft, verify, accept; one `Round` a row."""
        began = self._now()
        block = self._propose()
        drafted = self._now()
        width = block.tokens.shape[1]
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), width + 1)], dim=1)
        positions = self.lengths.unsqueeze(1) + torch.arange(width + 1, device=self.device)
        hidden, aux = self._forward(torch.cat([self.anchors.unsqueeze(1), block.tokens], dim=1), positions)
        logits = self.verifier.next_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        p = self._distribution(logits)
        if self.temperature == 0:
            kept, bonus = accept_greedy(p.argmax(-1), block.tokens, block.proposed)
        else:
            # A fixed number of coins a round, so that no row's draws depend on its batch.
            coins = self._uniforms(self.settings.num_proposals + 1)
            kept, bonus = accept_sampled(
                p, block.q, block.tokens, block.ids, block.proposed, self.kept_ids, coins
            )
        self._drop_rejected(kept, width)
        verified = self._now()
        self.draft.extend(self.context, aux, positions, kept + 1)
        extended = self._now()
        slots = self._slots(block, logits, p) if self.diagnostics else None
        yield from self._emit(
            block.tokens,
            block.proposed,
            kept,
            bonus,
            (drafted - began + extended - verified, verified - drafted),
            slots,
            prefill=False,
        )

    def _distribution(self, logits: Float[Tensor, "... W"]) -> Float[Tensor, "... W"]:
        """What the verifier samples from; at temperature 0 its logits, of which only the arg max matters."""
        if self.temperature == 0:
            return logits
        return sampling_distribution(logits, self.temperature, self.settings.top_k, self.settings.top_p)

    # ---- the draft

    def _propose(self) -> _Block:
        """Draft one block a row, left to right: each proposal conditions the next through the sequential head."""
        draft, settings, rows = self.draft, self.settings, len(self.rows)
        hidden = draft.draft_block(self.context, self.anchors, draft.config.block_size)  # [B, N, H]
        count = settings.num_proposals
        base = draft.logits(hidden[:, :count], None)
        head = draft.markov_head
        state = None if head is None else head.initial_state(hidden[:, 0])
        draws = self._uniforms(count) if self.sampled else None
        alive = torch.ones(rows, dtype=torch.bool, device=self.device)
        proposed = torch.zeros(rows, dtype=torch.int64, device=self.device)
        previous_ids, tokens, ids, logits, confidence = self.anchors, [], [], [], []
        for i in range(count):
            previous = draft.previous_embedding(previous_ids)
            if draft.confidence_head is not None:
                confidence.append(draft.confidence_logits(hidden[:, i], previous).sigmoid())
                if settings.confidence_threshold is not None:
                    alive = alive & (confidence[-1] >= settings.confidence_threshold)
                    if not bool(alive.any()):
                        confidence.pop()
                        break
            proposed += alive
            step = base[:, i]
            if head is not None:
                features, state = head.step(previous, hidden[:, i], state)
                step = step + draft.bias(features, hidden.dtype)
            if self.sampled:
                step = step / self.temperature
                chosen = draw(step.softmax(-1), draws[:, i])
            else:
                chosen = step.argmax(-1)
            previous_ids = self.kept_ids[chosen]
            tokens.append(previous_ids)
            ids.append(chosen)
            logits.append(step)
        if not tokens:
            empty = torch.zeros(rows, 0, dtype=torch.int64, device=self.device)
            return _Block(empty, empty, proposed, None, None, None)
        stacked = torch.stack(logits, 1)
        return _Block(
            tokens=torch.stack(tokens, 1),
            ids=torch.stack(ids, 1),
            proposed=proposed,
            logits=stacked,
            q=stacked.softmax(-1) if self.sampled else None,
            confidence=torch.stack(confidence, 1) if confidence else None,
        )

    # ---- bookkeeping

    def _drop_rejected(self, kept: Int[Tensor, " B"], width: int) -> None:
        """Forget the verifier's keys and values of rejected drafts."""
        longest = int(kept.max())
        if width > longest:
            self.cache.crop(longest - width)
        column = torch.arange(longest + 1, device=self.device)
        new = column <= kept.unsqueeze(1)
        if self.mask is None and not bool(new.all()):
            total = self.cache.get_seq_length()
            self.mask = torch.ones(len(self.rows), total, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            total = self.cache.get_seq_length()
            self.mask = self.mask[:, :total].clone()
            self.mask[:, total - longest - 1 :] = new
            holes = total - int(self.mask.sum(1).max())
            # Sliding layers count columns, so there a row's real tokens must stay next to each other.
            if holes > MAX_HOLES or (self.sliding and not bool(new.all())):
                self._squeeze()

    def _squeeze(self) -> None:
        """Move every row's real columns to the right end and cut what no row needs."""
        counts = self.mask.sum(1)
        longest = int(counts.max())
        order = self.mask.long().argsort(dim=1, stable=True)[:, -longest:]  # real columns last, in order
        for layer in self.cache.layers:
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.replace(layer.keys.gather(2, index), layer.values.gather(2, index))
        self.mask = torch.arange(longest, device=self.device) >= longest - counts.unsqueeze(1)
        if bool(self.mask.all()):
            self.mask = None

    def _emit(
        self,
        drafts: Int[Tensor, "B n"],
        proposed: Int[Tensor, " B"],
        kept: Int[Tensor, " B"],
        bonus: Int[Tensor, " B"],
        seconds: tuple[float, float],
        slots: dict[str, list[list[float]]] | None,
        *,
        prefill: bool,
    ) -> Iterator[Round]:
        """Advance every row, cut texts at a stop token or their length, and drop finished rows."""
        share = 1000.0 / len(self.rows)
        finished, steps = [], []
        columns = zip(*(t.tolist() for t in (drafts, proposed, kept, bonus, self.lengths)), strict=True)
        for b, (mine, count, m, own, length) in enumerate(columns):
            request = self.rows[b]
            room = self.room[request]
            tokens = [*mine[:m], own]
            stop = next((k + 1 for k, token in enumerate(tokens) if token in self.stop), None)
            end = min(room, len(tokens) if stop is None else stop)
            tokens = tokens[:end]
            self.room[request] -= end
            reason = "stop" if tokens[-1] in self.stop else "length" if end == room else None
            steps.append(
                Round(
                    request=request,
                    anchor=length - 1 if prefill else length,
                    prefill=prefill,
                    proposed=count,
                    accepted=min(m, end),
                    tokens=tokens,
                    finish_reason=reason,
                    draft_ms=seconds[0] * share,
                    verify_ms=seconds[1] * share,
                    slots=None if slots is None else _cut_slots(slots, b, count, m, end, room, reason),
                )
            )
            finished.append(reason is not None)
        if not prefill:
            self.lengths = self.lengths + kept + 1
        self.anchors = bonus
        self._leave(finished)
        yield from steps

    def _leave(self, finished: list[bool]) -> None:
        if not any(finished):
            return
        staying = [b for b, done in enumerate(finished) if not done]
        self.rows = [self.rows[b] for b in staying]
        if not self.rows:
            return
        keep = torch.tensor(staying, device=self.device)
        self.cache.batch_select_indices(keep)
        self.context.select(keep)
        self.lengths, self.anchors = self.lengths[keep], self.anchors[keep]
        if self.mask is not None:
            self.mask = self.mask[keep]

    def _uniforms(self, count: int) -> Float[Tensor, "B n"]:
        """Uniform numbers in [0, 1) from each row's own generator."""
        rows = [
            torch.rand(count, generator=self.generators[request], dtype=torch.float64)
            for request in self.rows
        ]
        return torch.stack(rows).to(self.device)

    def _slots(self, block: _Block, logits: Tensor, p: Tensor) -> dict[str, list[list[float]]] | None:
        """Columns of the slot table for every proposal of the block, as [B][n] lists."""
        width = block.tokens.shape[1]
        if not width:
            return None
        # As in replay, greedy text is compared at temperature 1.
        target = p[:, :width] if self.temperature > 0 else logits[:, :width].softmax(-1)
        q = block.q if block.q is not None else self._draft_distribution(block.logits)
        top = q.topk(min(2, q.shape[-1]), dim=-1).values
        proposed_p = target.gather(-1, block.tokens.unsqueeze(-1)).squeeze(-1)
        if self.temperature == 0:
            r = (block.tokens == logits[:, :width].argmax(-1)).float()
        elif block.q is None:
            r = proposed_p
        else:
            r = (proposed_p / q.gather(-1, block.ids.unsqueeze(-1)).squeeze(-1)).clamp(max=1.0)
        confidence = block.confidence if block.confidence is not None else torch.full_like(r, float("nan"))
        values = {
            "r": r,
            "alpha": torch.minimum(q, target[..., self.kept_ids]).sum(-1).clamp(max=1.0),
            "confidence": confidence,
            "p_prefix_survives": confidence.cumprod(-1),
            "entropy": -torch.xlogy(q, q).sum(-1),
            "max_prob": top[..., 0],
            "margin": top[..., 0] - top[..., -1],
        }
        return {name: value.tolist() for name, value in values.items()}

    def _draft_distribution(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature if self.temperature > 0 else logits).softmax(-1)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass
class _Block:
    """Proposals of one round: verifier ids, draft ids, how many each row really proposes, and what they came from."""

    tokens: Int[Tensor, "B n"]
    ids: Int[Tensor, "B n"]
    proposed: Int[Tensor, " B"]
    logits: Float[Tensor, "B n V"] | None
    q: Float[Tensor, "B n V"] | None
    confidence: Float[Tensor, "B n"] | None


def _cut_slots(
    slots: dict[str, list[list[float]]],
    b: int,
    proposed: int,
    m: int,
    end: int,
    room: int,
    reason: str | None,
) -> dict[str, list[float]]:
    """Slot rows of one round: its proposals as far as the text could reach, with `reached` and `accepted` as 0 or 1."""
    inside = min(proposed, end if reason == "stop" and end <= m else room)
    columns = {name: values[b][:inside] for name, values in slots.items()}
    columns["position"] = list(range(1, inside + 1))
    columns["reached"] = [float(i <= m) for i in range(inside)]
    columns["accepted"] = [float(i < m) for i in range(inside)]
    return columns


def sampling_distribution(
    logits: Float[Tensor, "*batch W"], temperature: float, top_k: int, top_p: float
) -> Float[Tensor, "*batch W"]:
    """softmax(logits / temperature) in fp32, cut to the `top_k` likeliest tokens and then to the `top_p` nucleus.

    The nucleus is the smallest set of likeliest tokens whose mass reaches `top_p`; its last token is kept. 0 and 1 cut nothing.
    """
    scaled = logits.float() / temperature
    if 0 < top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    p = scaled.softmax(-1)
    if top_p < 1.0:
        ordered, index = p.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(p: Float[Tensor, "B W"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Inverse CDF: the token at which the cumulative sum of `p`, in float64, passes `uniform` in [0, 1)."""
    cumulative = p.double().cumsum(-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(p.shape[-1] - 1)


def accept_greedy(
    best: Int[Tensor, "B m"], drafts: Int[Tensor, "B n"], proposed: Int[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """(drafts kept, the verifier's own next token): keep while a draft equals the verifier's arg max; m = n + 1."""
    width = drafts.shape[1]
    offered = torch.arange(width, device=drafts.device) < proposed.unsqueeze(1)
    kept = ((drafts == best[:, :width]) & offered).long().cumprod(1).sum(1)
    return kept, best.gather(1, kept.unsqueeze(1)).squeeze(1)


def accept_sampled(
    p: Float[Tensor, "B m W"],
    q: Float[Tensor, "B n V"] | None,
    drafts: Int[Tensor, "B n"],
    draft_ids: Int[Tensor, "B n"],
    proposed: Int[Tensor, " B"],
    kept_ids: Int[Tensor, " V"],
    coins: Float[Tensor, "B c"],
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """(drafts kept, the token after them) by speculative sampling, whose text is distributed as p; m = n + 1.

    Draft i is kept with probability min(1, p_i(d) / q_i(d)), the first lost one replaced by a draw from max(p_i - q_i, 0);
    after the last proposal the token comes from p. `q` None means greedy drafts: all of q on the draft. `kept_ids` maps
    draft ids (columns of q) to verifier ids. Coin i decides draft i, the last one draws the final token; c > n.
    """
    width = drafts.shape[1]
    offered = torch.arange(width, device=drafts.device) < proposed.unsqueeze(1)
    p_draft = p[:, :width].gather(-1, drafts.unsqueeze(-1)).squeeze(-1).double()
    q_draft = 1.0 if q is None else q.gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1).double()
    kept = ((coins[:, :width] * q_draft < p_draft) & offered).long().cumprod(1).sum(1)
    row = torch.arange(len(p), device=p.device)
    final = p[row, kept].clone()  # [B, W]
    lost = kept < proposed
    place = kept.clamp_max(max(width - 1, 0))
    if bool(lost.any()):
        residual = final[lost]
        if q is None:
            residual.scatter_(1, drafts[row, place][lost].unsqueeze(1), 0.0)
        else:
            residual[:, kept_ids] -= q[row, place][lost]
            residual.clamp_(min=0.0)
        # p = q up to rounding leaves no residual; then p itself is the right distribution.
        void = residual.sum(-1, keepdim=True) <= 0
        final[lost] = torch.where(void, final[lost], residual)
    return kept, draw(final, coins[:, -1])
