"""The verifier's own answers to prompts, kept as tokens: generation, multi-turn assembly, and token-level sets on disk.

A loss mask marks the tokens that were generated, recorded as they were generated. Text is never searched for markers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark import __version__
from dspark.data.features import DocumentInfo, document_id
from dspark.data.generation import Request, Response, generate
from dspark.data.prompts import Prompt
from dspark.verifier import Verifier, VerifierInfo

TOKEN_SET_VERSION = 1


class AllTooLong(ValueError):
    """No prompt of those given leaves room for an answer."""


@dataclass(frozen=True, kw_only=True)
class TokenDocument:
    """A conversation as tokens. `spans` are the half-open ranges [start, end) that the verifier generated."""

    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    prompt_id: str
    domain: str
    split: str
    temperature: float
    finish_reason: str

    @property
    def loss_mask(self) -> list[bool]:
        mask = [False] * len(self.input_ids)
        for start, end in self.spans:
            mask[start:end] = [True] * (end - start)
        return mask

    def info(self) -> DocumentInfo:
        return DocumentInfo(
            doc_id=document_id(self.input_ids, self.loss_mask, temperature=self.temperature),
            prompt_id=self.prompt_id,
            domain=self.domain,
            split=self.split,
            temperature=self.temperature,
            finish_reason=self.finish_reason,
            prompt_tokens=self.spans[0][0],
            response_tokens=sum(end - start for start, end in self.spans),
            tokens=len(self.input_ids),
        )


@dataclass
class _Conversation:
    """A conversation in progress: tokens so far, generated ranges, and the messages that stand for them."""

    prompt: Prompt
    temperature: float
    seed: int
    messages: list[dict[str, str]]
    ids: list[int]
    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = "stop"


def answer_prompts(
    verifier: Verifier,
    prompts: Sequence[Prompt],
    *,
    temperature: float | Callable[[Prompt], float],
    seed: int,
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
    mask_token_id: int,
    template_options: Mapping[str, Any],
    progress: Callable[[int], None],
    respond: Callable[..., Iterator[tuple[int, Response]]] = generate,
) -> tuple[list[TokenDocument], Counter[str]]:
    """Let the verifier answer every turn of every prompt; returns documents in prompt order and counts of what was left out.

    A turn is answered in the tokens of all earlier turns, as generated: the text between two answers comes from rendering
    the conversation with the chat template and taking what follows the answer. `progress` receives generated token counts.
    `respond` answers requests as `generate` does; speculative decoding takes its place in evaluation.

    Counts: `too_long` (rendered prompt leaves less than one token below `max_length`; a later turn that does not fit ends its
    conversation and is counted as `turn_too_long`), `history_rewritten` (the template renders an earlier answer differently
    from how it was generated, so the conversation ends before that turn), `mask_token` (text that contains it).

    Raises:
        AllTooLong: if every prompt is too long.
    """
    skipped: Counter[str] = Counter()
    documents: dict[int, TokenDocument] = {}
    active: dict[int, _Conversation] = {}
    longest = 0
    for i, prompt in enumerate(prompts):
        first = prompt.messages[: prompt.turn_ends[0]]
        text = verifier.chat_text(first, add_generation_prompt=True, template_options=template_options)
        ids = verifier.encode(text)
        longest = max(longest, len(ids))
        if len(ids) >= max_length:
            skipped["too_long"] += 1
        elif mask_token_id in ids:
            skipped["mask_token"] += 1
        else:
            t = temperature(prompt) if callable(temperature) else temperature
            active[i] = _Conversation(prompt, t, row_seed(seed, prompt.prompt_id, t), list(first), ids, text)
    if prompts and skipped["too_long"] == len(prompts):
        raise AllTooLong(
            f"all {len(prompts)} prompts are longer than max_length={max_length} tokens (the longest has {longest}); "
            "raise max_length or shorten the prompts."
        )

    turn = 0
    while active:
        order = list(active)
        requests = [
            Request(
                prompt_ids=active[i].ids, temperature=active[i].temperature, seed=active[i].seed + 7919 * turn
            )
            for i in order
        ]
        room = {i: max_length - len(active[i].ids) for i in order}
        responses = dict(
            _with_progress(
                respond(verifier, requests, max_new_tokens=max_new_tokens, batch_size=batch_size), progress
            )
        )
        for position, i in enumerate(order):
            talk, response = active[i], responses[position]
            tokens, reason = response.token_ids[: room[i]], response.finish_reason
            talk.finish_reason = reason if len(tokens) == len(response.token_ids) else "length"
            start = len(talk.ids)
            talk.ids = talk.ids + tokens
            talk.spans.append((start, len(talk.ids)))
            outcome = _next_turn(verifier, talk, turn + 1, max_length, template_options)
            if outcome != "continue":
                if outcome != "finished":
                    skipped[outcome] += 1
                del active[i]
                if mask_token_id in talk.ids:
                    skipped["mask_token"] += 1
                else:
                    documents[i] = _finish(talk)
        turn += 1
    return [documents[i] for i in sorted(documents)], skipped


def row_seed(seed: int, prompt_id: str, temperature: float) -> int:
    """A seed that depends on the prompt itself, so that adding or reordering prompts changes no other response."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}/{temperature:.4f}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _with_progress(
    stream: Iterator[tuple[int, Response]], progress: Callable[[int], None]
) -> Iterator[tuple[int, Response]]:
    for index, response in stream:
        progress(len(response.token_ids))
        yield index, response


def _next_turn(
    verifier: Verifier, talk: _Conversation, turn: int, max_length: int, template_options: Mapping[str, Any]
) -> str:
    """Extend `talk` to its next question: "continue", "finished", or the reason why it must end here."""
    ends = talk.prompt.turn_ends
    if turn >= len(ends):
        return "finished"
    start, end = talk.spans[-1]
    answer = talk.ids[start:end]
    stopped = bool(answer) and answer[-1] in verifier.info.eos_token_ids
    said = verifier.tokenizer.decode(answer[:-1] if stopped else answer)
    messages = [
        *talk.messages,
        {"role": "assistant", "content": said},
        *talk.prompt.messages[ends[turn - 1] : ends[turn]],
    ]
    text = verifier.chat_text(messages, add_generation_prompt=True, template_options=template_options)
    if not text.startswith(talk.text + said):
        return "history_rewritten"
    rest = text[len(talk.text + said) :]
    if stopped:
        closing = verifier.tokenizer.decode([answer[-1]])
        if not rest.startswith(closing):
            return "history_rewritten"
        rest = rest[len(closing) :]
    addition = verifier.encode(rest)
    if len(talk.ids) + len(addition) >= max_length:
        return "turn_too_long"
    talk.messages, talk.text, talk.ids = messages, text, talk.ids + addition
    return "continue"


def _finish(talk: _Conversation) -> TokenDocument:
    return TokenDocument(
        input_ids=tuple(talk.ids),
        spans=tuple(talk.spans),
        prompt_id=talk.prompt.prompt_id,
        domain=talk.prompt.domain,
        split=talk.prompt.split,
        temperature=talk.temperature,
        finish_reason=talk.finish_reason,
    )


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Documents as tokens with their origin: everything a feature cache needs except the hidden states.

    On disk: `<name>.npz` with the integers and `<name>.json` with the manifest.
    """

    documents: tuple[TokenDocument, ...]
    manifest: dict[str, Any]

    @classmethod
    def create(
        cls,
        documents: Sequence[TokenDocument],
        *,
        verifier: VerifierInfo,
        command: str,
        generation: Mapping[str, Any],
        dataset: str,
        skipped: Mapping[str, int],
    ) -> TokenSet:
        """Describe `documents`; counts and the content hash in the manifest come from them."""
        if not documents:
            raise ValueError(f"no document of {dataset!r} is left; skipped: {dict(skipped) or 'nothing'}.")
        by: dict[str, Counter[str]] = {"split": Counter(), "domain": Counter(), "temperature": Counter()}
        for d in documents:
            by["split"][d.split] += 1
            by["domain"][d.domain] += 1
            by["temperature"][f"{d.temperature:g}"] += 1
        infos = [d.info() for d in documents]
        manifest = {
            "format_version": TOKEN_SET_VERSION,
            "dataset": dataset,
            "verifier": asdict(verifier),
            "responses_by": verifier.name,
            "generation": dict(generation),
            "command": command,
            "producer": f"dspark {__version__}",
            "documents": len(documents),
            "tokens": sum(i.tokens for i in infos),
            "response_tokens": sum(i.response_tokens for i in infos),
            "counts": {k: dict(sorted(v.items())) for k, v in by.items()},
            "finish_reasons": dict(sorted(Counter(i.finish_reason for i in infos).items())),
            "skipped": dict(sorted(skipped.items())),
            "content_sha": hashlib.sha256("\n".join(i.doc_id for i in infos).encode()).hexdigest(),
        }
        return cls(documents=tuple(documents), manifest=manifest)

    def save(self, stem: str | Path) -> list[Path]:
        """Write `<stem>.npz` and `<stem>.json`, each under a temporary name first; returns both paths."""
        docs = self.documents
        highest = max(max(d.input_ids) for d in docs)
        tables = {name: sorted({getattr(d, name) for d in docs}) for name in _CATEGORIES}
        arrays: dict[str, np.ndarray] = {
            "tokens": np.concatenate([np.asarray(d.input_ids) for d in docs]).astype(
                np.uint16 if highest < 2**16 else np.uint32
            ),
            "lengths": np.asarray([len(d.input_ids) for d in docs], dtype=np.uint32),
            "spans": np.asarray([s for d in docs for s in d.spans], dtype=np.uint32),
            "span_counts": np.asarray([len(d.spans) for d in docs], dtype=np.uint16),
            "prompt_ids": np.asarray([d.prompt_id for d in docs]),
        }
        for name, table in tables.items():
            arrays[name] = np.asarray([table.index(getattr(d, name)) for d in docs], dtype=np.uint8)
        data, manifest = _set_files(stem)
        data.parent.mkdir(parents=True, exist_ok=True)
        temporary = data.with_name(data.name + ".tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)
        sha = hashlib.sha256(temporary.read_bytes()).hexdigest()
        temporary.rename(data)
        draft = manifest.with_name(manifest.name + ".tmp")
        draft.write_text(json.dumps({**self.manifest, "tables": tables, "data_sha256": sha}, indent=1) + "\n")
        draft.rename(manifest)
        return [data, manifest]

    @classmethod
    def load(cls, stem: str | Path) -> TokenSet:
        """Read a token-level set.

        Raises:
            ValueError: if a file is missing, damaged, or of another format version.
        """
        data, manifest_file = _set_files(stem)
        for file in (data, manifest_file):
            if not file.is_file():
                raise ValueError(f"{file} is missing; a token-level set is a pair of .npz and .json files.")
        manifest = json.loads(manifest_file.read_text())
        if manifest.get("format_version") != TOKEN_SET_VERSION:
            raise ValueError(
                f"{manifest_file} has format version {manifest.get('format_version')}, this release reads "
                f"{TOKEN_SET_VERSION}."
            )
        found = hashlib.sha256(data.read_bytes()).hexdigest()
        if found != manifest["data_sha256"]:
            raise ValueError(
                f"{data} is damaged: sha256 {found[:16]}..., its manifest says {manifest['data_sha256'][:16]}...; "
                "restore both files from where they came from."
            )
        tables = manifest.pop("tables")
        with np.load(data) as arrays:
            columns = {name: arrays[name] for name in arrays.files}
        ends, span_ends = columns["lengths"].cumsum(), columns["span_counts"].astype(np.int64).cumsum()
        tokens, spans = columns["tokens"].tolist(), [tuple(s) for s in columns["spans"].tolist()]
        documents = []
        for i, (length, count) in enumerate(zip(columns["lengths"], columns["span_counts"], strict=True)):
            documents.append(
                TokenDocument(
                    input_ids=tuple(tokens[int(ends[i] - length) : int(ends[i])]),
                    spans=tuple(spans[int(span_ends[i]) - int(count) : int(span_ends[i])]),
                    prompt_id=str(columns["prompt_ids"][i]),
                    **{name: tables[name][columns[name][i]] for name in _CATEGORIES},
                )
            )
        return cls(documents=tuple(documents), manifest=manifest)

    def check_verifier(self, verifier: VerifierInfo) -> None:
        """Raise ValueError if the set was written by a verifier with other weights, tokenizer or chat template."""
        theirs = self.manifest["verifier"]
        names = ("weights_sha", "tokenizer_sha", "chat_template_sha")
        differing = [n for n in names if theirs[n] != getattr(verifier, n)]
        if differing:
            rows = "; ".join(
                f"{n}: {getattr(verifier, n)[:12]} in {verifier.name}, {theirs[n][:12]} in the set"
                for n in differing
            )
            raise ValueError(
                f"the token-level set {self.manifest['dataset']!r} holds answers of {theirs['name']!r}, not of "
                f"{verifier.name!r} ({rows}). Generate answers with this verifier: data=templates or data=jsonl."
            )


def _set_files(stem: str | Path) -> tuple[Path, Path]:
    # Not with_suffix: a stem may have dots of its own.
    return Path(f"{stem}.npz"), Path(f"{stem}.json")


_CATEGORIES = ("domain", "split", "temperature", "finish_reason")
