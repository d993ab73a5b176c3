"""Where two readings of one draft part ways: contract, files, weights, forward passes, a real engine, in that order.

Each stage compares the draft as trained with the next reading of it and yields findings. When numbers differ, the known faults
are applied to the trained draft one at a time; the one whose output equals what was seen is the likely cause. That names
faults which no field of a configuration shows, because the engine itself commits them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.blocks import DraftBatch
from dspark.config import Contract, DraftConfig
from dspark.export import inventory
from dspark.importing import (
    ENGINE_ROPE_THETA,
    SKIPPED,
    Served,
    engine_config,
    stated_num_verifier_layers,
    stated_rope_theta,
)
from dspark.nn.draft import ContextCache, Draft

STAGES = ("contract", "files", "weights", "decode forward", "import forward", "engine")
FORWARD_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Finding:
    """One comparison. `cause` is what most likely went wrong, in words; empty where `ok` or nothing known fits."""

    stage: str
    ok: bool
    detail: str
    cause: str = ""


@dataclass(frozen=True)
class Probe:
    """Text to compare forward passes on. `aux` maps every verifier layer id that may be tapped to its states [S, H].

    Anchors are the positions from `first_anchor` on.
    """

    input_ids: Int[Tensor, " S"]
    first_anchor: int
    aux: Mapping[int, Tensor]
    final_norm: Float[Tensor, " H"] | None = None
    head: Float[Tensor, "W H"] | None = None

    def taps(self, ids: Sequence[int]) -> Float[Tensor, "S L H"]:
        return torch.stack([self.aux[i] for i in ids], dim=1)


@dataclass(frozen=True)
class Proposals:
    """What a draft proposes greedily from every anchor, each proposal after its own drafts: logits and verifier ids."""

    logits: Float[Tensor, "A N V"]
    tokens: Int[Tensor, "A N"]


def first_difference(findings: Sequence[Finding]) -> Finding | None:
    """The failed finding of the earliest stage; None when all agree."""
    failed = [f for f in findings if not f.ok]
    return min(failed, key=lambda f: STAGES.index(f.stage)) if failed else None


# ---- contract fields


def compare_contracts(contracts: Mapping[str, Contract]) -> list[Finding]:
    """Every artefact against the first, field by field."""
    (first, reference), *others = contracts.items()
    findings = []
    for name, contract in others:
        differing = reference.differences(contract)
        for fact, (mine, theirs) in differing.items():
            findings.append(
                Finding(
                    "contract",
                    False,
                    f"{fact} is {_short(mine)} in {first}, {_short(theirs)} in {name}",
                    _contract_cause(fact, mine, theirs),
                )
            )
        if not differing:
            findings.append(Finding("contract", True, f"{name} agrees with {first}"))
    return findings


def _short(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _contract_cause(fact: str, mine: Any, theirs: Any) -> str:
    if fact == "aux_layer_ids" and len(mine) == len(theirs):
        shift = {b - a for a, b in zip(mine, theirs, strict=True)}
        if shift in ({1}, {-1}):
            return (
                f"taps shifted by one ({shift.pop():+d}): a configuration that numbers layers by their own index was read as one that "
                "counts layers passed, or the reverse"
            )
    if fact == "sample_from_anchor":
        return "layout flag flipped: every slot is read one place off"
    if fact == "rope_theta" and ENGINE_ROPE_THETA in (mine, theirs):
        return "rope theta lost: engines assume 1,000,000 when a configuration states none"
    causes = {
        "verifier_sha": "another verifier, or other weights of it",
        "tokenizer_sha": "another tokenizer",
        "vocab_map_sha": "another draft vocabulary: kept ids differ",
        "last": "final hidden states before and after the final norm were mixed up",
        "mask_token_id": "another mask token: its embedding row was never trained against",
        "block_size": "another number of slots: slots attend to each other, so every position changes",
        "layer_types": "attention pattern lost",
        "sliding_window": "attention window lost",
    }
    return causes.get(fact, f"{fact} differs")


# ---- files of an export


def served_width(served: Served, config: DraftConfig) -> DraftConfig:
    """`config` with the slots an engine would draft: from the number of tokens the folder asks for, not from block_size."""
    methods = (served.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens") or served.facts.get("num_speculative_tokens")
    if not tokens:
        return config
    return replace(config, block_size=tokens if config.sample_from_anchor else tokens + 1)


def check_files(served: Served) -> list[Finding]:
    """What a folder gets wrong by itself, most of which engines accept without a word."""
    problems: list[tuple[str, str]] = []
    decoder, top = served.decoder, served.config
    if served.nested and top.get("model_type") not in (None, "speculators"):
        problems.append(
            (f"top-level model_type {top['model_type']!r}", "vLLM ignores transformer_layer_config then")
        )
    try:
        if stated_rope_theta(decoder) is None:
            problems.append(
                (
                    "no rope theta is stated",
                    "rope theta lost: engines assume 1,000,000 when a configuration states none",
                )
            )
    except ValueError as error:
        problems.append((str(error), "rope theta stated twice, differently"))
    if served.kind == "speculators-dspark" and "sample_from_anchor" not in top:
        problems.append(("sample_from_anchor is not stated", "layout flag lost: engines assume fill-in"))
    if served.kind == "dense-dspark" and "sample_from_anchor" not in top and top.get("dspark_bonus_anchor"):
        problems.append(
            ("only dspark_bonus_anchor is stated", "layout flag lost: vLLM from 0.27.0 on reads anchor-first")
        )
    if "head_dim" not in decoder:
        problems.append(("head_dim is not stated", "engines assume hidden_size / heads"))
    try:
        config = engine_config(served, num_verifier_layers=stated_num_verifier_layers(served) or 10_000)
    except ValueError as error:
        problems.append((str(error), "the configuration cannot be read"))
        return _file_findings(problems)
    tokens = served_width(served, config).num_proposals
    if tokens != config.num_proposals:
        layout = "anchor-first" if config.sample_from_anchor else "fill-in"
        problems.append(
            (
                f"{tokens} speculative tokens with block_size {config.block_size} in the {layout} layout, which proposes {config.num_proposals}",
                "layout flag flipped, or tokens and block size do not belong together",
            )
        )
    problems += _tensor_problems(served, config)
    return _file_findings(problems)


def _file_findings(problems: Sequence[tuple[str, str]]) -> list[Finding]:
    if not problems:
        return [Finding("files", True, "configuration and tensors are complete and consistent")]
    return [Finding("files", False, detail, cause) for detail, cause in problems]


def _tensor_problems(served: Served, config: DraftConfig) -> list[tuple[str, str]]:
    problems = []
    expected = inventory(config, embed_tokens=True)
    optional = {"embed_tokens.weight", "t2d"} | (set() if config.pruned else {"lm_head.weight"})
    for name, spec in expected.items():
        tensor = served.tensors.get(name)
        if tensor is None:
            if name not in optional:
                problems.append((f"{name} is missing", "engines load the rest and leave this uninitialised"))
        elif tuple(tensor.shape) != spec.shape:
            problems.append(
                (f"{name} is {tuple(tensor.shape)}, the configuration says {spec.shape}", "shapes differ")
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append((f"{name} has NaN or infinite values", "damaged weights"))
    for name in served.tensors:
        if name not in expected and name not in SKIPPED:
            problems.append((f"unexpected tensor {name}", "engines refuse unknown names"))
        elif name in ("verifier_norm.weight", "verifier_lm_head.weight"):
            problems.append((f"training-only tensor {name}", "engines refuse it"))
    if config.pruned and "d2t" in served.tensors:
        problems += _map_problems(served.tensors["d2t"], served.tensors.get("t2d"), config.vocab_size)
    return problems


def _map_problems(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> list[tuple[str, str]]:
    kept = d2t.long() + torch.arange(len(d2t))
    marked = None if t2d is None else t2d.nonzero().squeeze(-1)
    sound = bool((kept.diff() > 0).all()) and int(kept.max()) < vocab_size
    if sound and (marked is None or torch.equal(kept, marked)):
        return []
    absolute = (
        torch.equal(d2t.long(), marked) if marked is not None else bool((d2t.diff() > 0).all()) and not sound
    )
    if absolute:
        return [
            (
                "d2t holds the kept ids themselves",
                "d2t written as absolute ids; engines add the draft id to it",
            )
        ]
    return [("d2t and t2d disagree about the draft vocabulary", "the vocabulary map is stale or damaged")]


# ---- weights


@torch.no_grad()
def compare_weights(draft: Draft, served: Served, probe: Probe | None) -> list[Finding]:
    """Every tensor of the folder against the trained one at the folder's precision, bit for bit."""
    state = {name: t for name, t in draft.state_dict().items() if name not in ("lm_head", "kept_ids")}
    state["lm_head.weight"] = draft.lm_head
    findings = []
    for name, tensor in served.tensors.items():
        if name not in state or tuple(tensor.shape) != tuple(state[name].shape):
            continue
        mine = state[name].to(tensor.dtype)
        if not torch.equal(mine, tensor):
            distance = float((mine.float() - tensor.float()).abs().max())
            findings.append(
                Finding(
                    "weights",
                    False,
                    f"{name} differs from the trained one by up to {distance:.3g}",
                    _weight_cause(name, tensor, draft, probe),
                )
            )
    return findings or [Finding("weights", True, f"all {len(served.tensors)} tensors equal the trained ones")]


def _weight_cause(name: str, tensor: Tensor, draft: Draft, probe: Probe | None) -> str:
    def same(other: Tensor) -> bool:
        return other.shape == tensor.shape and torch.equal(other.to(tensor.dtype), tensor)

    if name in ("norm.weight", "hidden_norm.weight"):
        if same(torch.ones_like(tensor)):
            return f"norm wrong: {name} is all ones, as if it had never been loaded"
        if same(draft.hidden_norm.weight if name == "norm.weight" else draft.norm.weight):
            return "norm wrong: the final norm and the context norm are swapped"
        if probe is not None and probe.final_norm is not None and same(probe.final_norm):
            return f"norm wrong: {name} is the verifier's final norm"
        return f"norm wrong: {name} is not the trained one"
    if name == "markov_head.markov_w1.weight":
        kept = draft.kept_ids
        if torch.equal(tensor[: len(kept)], draft.markov_head.markov_w1.weight[kept].to(tensor.dtype)):
            return "Markov table in draft ids: row j belongs to the j-th kept token, but engines index it by verifier ids"
    if (
        name == "lm_head.weight"
        and probe is not None
        and probe.head is not None
        and same(probe.head[: len(tensor)])
    ):
        return "head rows are the verifier's first ones, not those of the kept ids"
    return "another checkpoint's weights, or weights changed after export"


# ---- forward passes


def _batch(draft: Draft, probe: Probe, taps: Sequence[int]) -> DraftBatch:
    """The probe as one document whose anchors are every position from `first_anchor` on."""
    length, hidden = len(probe.input_ids), draft.config.hidden_size
    device = draft.fc.weight.device
    anchors = torch.arange(probe.first_anchor, length, device=device)[None]
    row = torch.arange(length, device=device)[None]
    return DraftBatch(
        input_ids=probe.input_ids[None].to(device),
        positions=row,
        doc_start=torch.zeros_like(row),
        loss_mask=torch.ones_like(row, dtype=torch.bool),
        aux=probe.taps(taps)[None].to(device, draft.fc.weight.dtype),
        last=torch.zeros(1, length, hidden, device=device),
        lse=torch.zeros(1, length, device=device),
        anchors=anchors,
        anchor_valid=torch.ones_like(anchors, dtype=torch.bool),
    )


@torch.no_grad()
def propose(
    draft: Draft, probe: Probe, *, taps: Sequence[int] | None = None, previous_in_draft_ids: bool = False
) -> Proposals:
    """Greedy proposals of every anchor by the training forward, each conditioned on the drafts before it.

    `taps` and `previous_in_draft_ids` reproduce faults: states of other layers, and drafts fed back without mapping them to
    verifier ids.
    """
    output = draft(_batch(draft, probe, draft.config.aux_layer_ids if taps is None else taps))
    hidden = output.hidden[0]
    previous = probe.input_ids[probe.first_anchor :].to(hidden.device)
    head = draft.markov_head
    state = None if head is None else head.initial_state(hidden[:, 0])
    logits, tokens = [], []
    for i in range(hidden.shape[1]):
        features = None
        if head is not None:
            features, state = head.step(draft.previous_embedding(previous), hidden[:, i], state)
        logits.append(draft.logits(hidden[:, i], features))
        choice = logits[-1].argmax(-1)
        tokens.append(draft.kept_ids[choice])
        previous = choice if previous_in_draft_ids else tokens[-1]
    return Proposals(torch.stack(logits, dim=1), torch.stack(tokens, dim=1))


@torch.no_grad()
def compare_decode(draft: Draft, probe: Probe) -> list[Finding]:
    """Training forward against the decode forward, which extends a cache token by token and drafts one block at a time."""
    batch = _batch(draft, probe, draft.config.aux_layer_ids)
    parallel = draft(batch).hidden[0]  # [A, N, H]
    cache = ContextCache(draft.config.num_layers)
    start = probe.first_anchor
    draft.extend(
        cache, batch.aux[:, :start], batch.positions[:, :start], torch.tensor([start], device=parallel.device)
    )
    worst, place = 0.0, start
    for a in range(start, len(probe.input_ids)):
        one = draft.draft_block(cache, batch.input_ids[:, a], draft.config.block_size)[0]
        gap = _relative_gap(one, parallel[a - start])
        if gap > worst:
            worst, place = gap, a
        step = torch.ones(1, dtype=torch.int64, device=parallel.device)
        draft.extend(cache, batch.aux[:, a : a + 1], batch.positions[:, a : a + 1], step)
    detail = f"hidden states differ by at most {worst:.2g} of their size over {len(parallel)} anchors"
    if worst <= FORWARD_TOLERANCE:
        return [Finding("decode forward", True, detail)]
    return [
        Finding(
            "decode forward",
            False,
            f"{detail}, worst at anchor {place}",
            "training and decode forward compute different things: a defect of this package",
        )
    ]


def _relative_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def as_engine_reads(served: Served, draft: Draft) -> Draft:
    """The folder as a draft the way vLLM >= 0.27.0 reads it: its silent defaults, its slots, its id arithmetic.

    Frozen tensors that the folder leaves out are those of `draft`. Raises ValueError when the folder cannot be read at all.
    """
    config = served_width(served, engine_config(served, num_verifier_layers=draft.config.num_verifier_layers))
    read = Draft(config, attention_backend=draft.attention_backend)
    state = {n: t.float() for n, t in served.tensors.items() if n in read.state_dict()}
    kept = torch.arange(config.draft_vocab_size)
    if config.pruned and "d2t" in served.tensors:
        kept = kept + served.tensors["d2t"].long()
    if int(kept.max()) >= config.vocab_size or int(kept.min()) < 0:
        raise ValueError(
            f"d2t leads to token {int(kept.max())}, the verifier has {config.vocab_size}; nothing can be drafted"
        )
    head = served.tensors.get("lm_head.weight", draft.lm_head)
    missing = [n for n in read.state_dict() if n not in state and n not in ("lm_head", "kept_ids")]
    if missing:
        raise ValueError(f"{missing[0]} is missing, so the engine's weights are uninitialised")
    read.load_state_dict(state | {"lm_head": head.float(), "kept_ids": kept})
    embedding = served.tensors.get("embed_tokens.weight", draft.embed_tokens)
    read.set_embedding(embedding, torch.float32)
    return read.eval()


def compare_import(draft: Draft, served: Served, probe: Probe) -> list[Finding]:
    """The trained draft against the folder as an engine reads it, on the probe; names the fault that explains a difference."""
    try:
        read = as_engine_reads(served, draft)
    except (ValueError, RuntimeError) as error:
        return [Finding("import forward", False, f"the folder cannot run: {error}")]
    rounded = _rounded(draft, served.tensors["fc.weight"].dtype)
    missing_taps = [i for i in read.config.aux_layer_ids if i not in probe.aux]
    if missing_taps:
        return [
            Finding(
                "import forward",
                False,
                f"the folder taps layers {missing_taps}, whose states are not at hand",
                _contract_cause("aux_layer_ids", draft.config.aux_layer_ids, read.config.aux_layer_ids),
            )
        ]
    seen, good = propose(read, probe), propose(rounded, probe)
    if _equal(seen, good):
        return [Finding("import forward", True, f"equal logits and tokens over {len(good.tokens)} anchors")]
    agree = _agreement(seen, good)
    cause = next(
        (
            f"{fault.name}: {fault.cause}"
            for fault in faults(rounded, probe, tokens=read.config.num_proposals)
            if _equal(fault.proposals(), seen)
        ),
        "",
    )
    return [Finding("import forward", False, f"only {agree:.0%} of the first proposals agree", cause)]


def _rounded(draft: Draft, dtype: torch.dtype) -> Draft:
    """`draft` with weights as the folder's precision holds them, computing in fp32."""
    copied = copy.deepcopy(draft).float()
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype).float()
    copied.lm_head = copied.lm_head.to(dtype).float()
    copied.embed_tokens = copied.embed_tokens.to(dtype).float()
    return copied.eval()


def _equal(a: Proposals, b: Proposals) -> bool:
    if a.logits.shape != b.logits.shape or not torch.equal(a.tokens, b.tokens):
        return False
    return _relative_gap(a.logits, b.logits) <= FORWARD_TOLERANCE


def _agreement(a: Proposals, b: Proposals) -> float:
    return float((a.tokens[:, 0] == b.tokens[:, 0]).float().mean())


# ---- known faults


@dataclass(frozen=True)
class Fault:
    """A known way to misread a draft, and what the trained draft would propose under it."""

    name: str
    cause: str
    proposals: Callable[[], Proposals]


def faults(draft: Draft, probe: Probe, *, tokens: int) -> list[Fault]:
    """The known faults applied to `draft`, as an engine asked for `tokens` drafts a round would commit them."""
    config = draft.config
    known: list[Fault] = []

    def add(name: str, cause: str, make: Callable[[], Proposals]) -> None:
        known.append(Fault(name, cause, make))

    for shift in (-1, 1):
        ids = tuple(i + shift for i in config.aux_layer_ids)
        if all(i in probe.aux for i in ids):
            add(
                "taps shifted by one",
                f"states of layers {list(ids)} instead of {list(config.aux_layer_ids)}",
                lambda ids=ids: propose(draft, probe, taps=ids),
            )
    flipped = not config.sample_from_anchor
    for width in {tokens if flipped else tokens + 1, config.block_size} - ({1} if not flipped else set()):
        add(
            "layout flag flipped",
            f"drafted {'anchor-first' if flipped else 'fill-in'} with {width} slots",
            lambda width=width: propose(_changed(draft, sample_from_anchor=flipped, block_size=width), probe),
        )
    if config.rope_theta != ENGINE_ROPE_THETA:
        add(
            "rope theta lost",
            "rotary embeddings with theta 1,000,000, the engine's default",
            lambda: propose(_changed(draft, rope_theta=ENGINE_ROPE_THETA), probe),
        )
    if config.markov_rank and config.pruned:
        add(
            "Markov fed draft ids",
            "drafts are fed back as draft-vocabulary ids instead of verifier ids",
            lambda: propose(draft, probe, previous_in_draft_ids=True),
        )
        add(
            "Markov table in draft ids",
            "the table's rows are in draft-vocabulary order",
            lambda: propose(_table_in_draft_ids(draft), probe),
        )
    for name, cause, change in _norm_faults(probe):
        add(f"norm wrong ({name})", cause, lambda change=change: propose(_edited(draft, change), probe))
    if config.logit_scale != 1.0:
        add("logit scale lost", "logits unscaled", lambda: propose(_changed(draft, logit_scale=1.0), probe))
    if config.pruned and int(draft.kept_ids.max()) + config.draft_vocab_size <= config.vocab_size:
        add(
            "d2t absolute",
            "draft ids were added to ids that are absolute already",
            lambda: propose(_edited(draft, _absolute_map), probe),
        )
    sliding = ("sliding_attention",) * config.num_layers
    if config.layer_types != sliding:
        window = config.sliding_window or config.max_position_embeddings
        add(
            "block attention causal",
            "slots see earlier slots only",
            lambda: propose(_changed(draft, layer_types=sliding, sliding_window=window), probe),
        )
    for difference in (-1, 1):
        width = config.block_size + difference
        if width > (0 if config.sample_from_anchor else 1):
            add(
                "other number of slots",
                f"{width} slots drafted where {config.block_size} were trained",
                lambda width=width: propose(_changed(draft, block_size=width), probe),
            )
    return known


def _norm_faults(probe: Probe) -> list[tuple[str, str, Callable[[Draft], None]]]:
    def swap(draft: Draft) -> None:
        draft.norm.weight.data, draft.hidden_norm.weight.data = (
            draft.hidden_norm.weight.data,
            draft.norm.weight.data,
        )

    def ones(which: str) -> Callable[[Draft], None]:
        return lambda draft: getattr(draft, which).weight.data.fill_(1.0)

    found = [
        ("swapped", "final norm and context norm exchanged", swap),
        ("final norm lost", "the final norm's weight is all ones", ones("norm")),
        ("context norm lost", "the context norm's weight is all ones", ones("hidden_norm")),
    ]
    if probe.final_norm is not None:
        weight = probe.final_norm

        def verifier_norm(draft: Draft) -> None:
            draft.norm.weight.data.copy_(weight)

        found.append(("the verifier's", "the verifier's final norm in place of the draft's", verifier_norm))
    return found


def _changed(draft: Draft, **changes: Any) -> Draft:
    """The same weights under another configuration."""
    other = Draft(replace(draft.config, **changes), attention_backend=draft.attention_backend)
    other.lm_head = other.lm_head.to(draft.lm_head.dtype)
    other.load_state_dict(draft.state_dict())
    other.set_embedding(draft.embed_tokens, draft.embed_tokens.dtype)
    return other.eval()


def _edited(draft: Draft, change: Callable[[Draft], None]) -> Draft:
    other = copy.deepcopy(draft)
    change(other)
    return other


def _absolute_map(draft: Draft) -> None:
    draft.kept_ids = draft.kept_ids + torch.arange(len(draft.kept_ids), device=draft.kept_ids.device)


def _table_in_draft_ids(draft: Draft) -> Draft:
    def change(other: Draft) -> None:
        table = other.markov_head.markov_w1.weight.data
        table[: len(other.kept_ids)] = table[other.kept_ids].clone()

    return _edited(draft, change)


# ---- a real engine


@dataclass(frozen=True)
class Counts:
    """Rounds and drafts kept at each position, as an engine counts them."""

    rounds: int
    accepted: tuple[int, ...]

    def distance(self, other: Counts) -> int:
        """Rounds and kept drafts that differ."""
        width = max(len(self.accepted), len(other.accepted))
        mine, theirs = (c.accepted + (0,) * (width - len(c.accepted)) for c in (self, other))
        return abs(self.rounds - other.rounds) + sum(abs(a - b) for a, b in zip(mine, theirs, strict=True))

    def __add__(self, other: Counts) -> Counts:
        width = max(len(self.accepted), len(other.accepted))
        mine, theirs = (c.accepted + (0,) * (width - len(c.accepted)) for c in (self, other))
        return Counts(self.rounds + other.rounds, tuple(a + b for a, b in zip(mine, theirs, strict=True)))


def walk(proposals: Proposals, probe: Probe, *, emitted: int) -> Counts:
    """Rounds along the probe's text until `emitted` tokens are out, and how many drafts each position kept.

    The first token comes from the prefill and is the first anchor; a round at `a` that keeps m drafts moves to a + m + 1. Counts
    of the last round include drafts beyond `emitted`, as the engine's do, so the text should reach N tokens further.
    """
    text = probe.input_ids
    width = proposals.tokens.shape[1]
    accepted = [0] * width
    rounds, at, out = 0, 0, 1
    while out < emitted and at < len(proposals.tokens):
        kept = 0
        while kept < width:
            place = probe.first_anchor + at + 1 + kept
            if place >= len(text) or int(proposals.tokens[at, kept]) != int(text[place]):
                break
            accepted[kept] += 1
            kept += 1
        rounds += 1
        at += kept + 1
        out += kept + 1
    return Counts(rounds, tuple(accepted))


def compare_engine(
    draft: Draft,
    probes: Sequence[Probe],
    observed: Sequence[Counts],
    *,
    emitted: int,
    tokens: int,
    slack: float,
) -> list[Finding]:
    """Counts of a real engine over greedy texts against those that the trained draft predicts along the same texts.

    `slack` is the share of counted events that may differ: bf16 arithmetic flips near-ties. A larger difference is explained by
    the known fault that predicts the observed counts best, if it does so within the slack.
    """
    seen = _total(observed)
    expected = _total([walk(propose(draft, p), p, emitted=emitted) for p in probes])
    events = expected.rounds + sum(expected.accepted)
    allowed = max(2, round(slack * events))
    detail = (
        f"rounds {seen.rounds}, kept by position {list(seen.accepted)}; predicted {expected.rounds}, {list(expected.accepted)} "
        f"over {len(probes)} prompts"
    )
    gap = seen.distance(expected)
    if gap <= allowed:
        if sum(expected.accepted) == 0:
            return [Finding("engine", True, f"{detail}; no draft is ever kept, so this says little")]
        return [Finding("engine", True, detail)]
    best: tuple[int, str] | None = None
    candidates: dict[str, list[Counts]] = {}
    for probe in probes:
        for fault in faults(draft, probe, tokens=tokens):
            label = f"{fault.name}: {fault.cause}"
            candidates.setdefault(label, []).append(walk(fault.proposals(), probe, emitted=emitted))
    for label, counts in candidates.items():
        distance = seen.distance(_total(counts))
        if best is None or distance < best[0]:
            best = (distance, label)
    cause = best[1] if best is not None and best[0] <= allowed else ""
    return [Finding("engine", False, detail, cause)]


def _total(counts: Sequence[Counts]) -> Counts:
    total = Counts(0, ())
    for c in counts:
        total = total + c
    return total


def contract_of_export(served: Served) -> Contract:
    """What the folder's configuration says, as an engine reads it, with the verifier facts its `dspark.json` records.

    Raises ValueError where the configuration cannot be read.
    """
    layers = stated_num_verifier_layers(served) or 10_000
    config = engine_config(served, num_verifier_layers=layers)
    contract = Contract.of_draft(config, vocab_map_sha=None)
    recorded = served.facts.get("contract", {})
    facts = {k: recorded.get(k) for k in ("verifier_sha", "tokenizer_sha", "last")}
    known = {k: v for k, v in facts.items() if v is not None}
    return replace(contract.merged(**known), num_verifier_layers=None if layers == 10_000 else layers)
