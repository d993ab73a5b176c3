"""Documents with a verifier's hidden states along them, and the cache that holds them on disk for every training run.

`Features` is how they are read, wherever they come from. A cache is a folder with `manifest.json`, `shard-00000.safetensors` ... and `verifier.safetensors`. Everything is written
under a temporary name and renamed, so a file with its final name is whole and a killed writer resumes where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark import __version__
from dspark.config import Contract
from dspark.verifier import Verifier, VerifierInfo

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = "collecting.json"
VERIFIER_FILE = "verifier.safetensors"
SPLITS = ("train", "validation", "test")
AUX_CONVENTION = "residual_after_i_layers"
DTYPES = {"input_ids": "int32", "loss_mask": "bool", "aux": "bfloat16", "last": "bfloat16", "lse": "float32"}

# Documents are read ahead in portions of this size by so many threads, and as many shards are written at once.
PORTION_BYTES = 64 << 20
THREADS = 4

# Bytes of names, offsets and metadata a document adds to its shard's header, measured.
DOCUMENT_OVERHEAD = 760


@dataclass(frozen=True, kw_only=True)
class DocumentInfo:
    """Where a document came from. `tokens` is its length S; `temperature` 0 means greedy text."""

    doc_id: str
    prompt_id: str
    domain: str
    split: str
    temperature: float
    finish_reason: str
    prompt_tokens: int
    response_tokens: int
    tokens: int


@dataclass(frozen=True)
class Document:
    """One conversation and the verifier's states along it.

    input_ids int64 [S]; loss_mask bool [S], true on tokens the verifier generated; aux bf16 [S, L, H]; last bf16 [S, H];
    lse fp32 [S], the log-sum-exp of the verifier's logits over its whole vocabulary.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    lse: Tensor
    info: DocumentInfo


@dataclass(frozen=True)
class Packed:
    """Features of whole documents end to end: aux bf16 [T, L, H], last bf16 [T, H], lse fp32 [T], T tokens in all."""

    documents: list[int]
    aux: Tensor
    last: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    file: str
    sha256: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds and how it came to be. The fields above the line below `last` decide what its numbers mean."""

    verifier: VerifierInfo
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int
    last: str
    # ---- provenance -------------------------------------------------------------------------------------------------
    dataset: str
    responses_by: str
    generation: dict[str, Any]
    capture: dict[str, Any]
    command: str
    # ---- counted by the writer --------------------------------------------------------------------------------------
    prompts_sha: str = ""
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    domains: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    stopped: str = "complete"
    shards: tuple[ShardInfo, ...] = ()
    verifier_file: ShardInfo | None = None
    aux_convention: str = AUX_CONVENTION
    dtypes: dict[str, str] = field(default_factory=lambda: dict(DTYPES))
    format_version: int = FORMAT_VERSION
    producer: str = f"dspark {__version__}"

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layer_ids", tuple(int(i) for i in self.aux_layer_ids))
        object.__setattr__(self, "shards", tuple(self.shards))
        if self.last not in ("post_norm", "pre_norm"):
            raise ValueError(f"manifest: last is {self.last!r}; expected post_norm or pre_norm.")

    @property
    def bytes(self) -> int:
        """Bytes of all shards and of the verifier's weights."""
        return sum(s.bytes for s in self.shards) + (self.verifier_file.bytes if self.verifier_file else 0)

    def contract(self) -> Contract:
        """The facts that a draft trained on this cache must share with it."""
        return Contract(
            verifier_sha=self.verifier.weights_sha,
            tokenizer_sha=self.verifier.tokenizer_sha,
            hidden_size=self.verifier.hidden_size,
            vocab_size=self.verifier.vocab_size,
            num_verifier_layers=self.verifier.num_layers,
            aux_layer_ids=self.aux_layer_ids,
            last=self.last,
            mask_token_id=self.mask_token_id,
            rope_theta=self.verifier.rope_theta,
        )

    def counted(self, infos: Sequence[DocumentInfo], **facts: Any) -> Manifest:
        """The manifest with the counts of `infos`, and `facts` in place of its fields."""
        prompts = sorted({f"{i.prompt_id}/{i.split}" for i in infos})
        return replace(
            self,
            prompts_sha=hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
            documents=len(infos),
            tokens=sum(i.tokens for i in infos),
            supervised_tokens=sum(i.response_tokens for i in infos),
            splits=dict(sorted(Counter(i.split for i in infos).items())),
            domains=dict(sorted(Counter(i.domain for i in infos).items())),
            **facts,
        )

    def check_document(
        self, info: DocumentInfo, input_ids: Tensor, split_of_prompt: Mapping[str, str]
    ) -> None:
        """Raise ValueError for an unknown split, a prompt that has another in `split_of_prompt`, or the mask token in text."""
        if info.split not in SPLITS:
            raise ValueError(f"document {info.doc_id}: split is {info.split!r}; expected one of {SPLITS}.")
        other = split_of_prompt.get(info.prompt_id, info.split)
        if other != info.split:
            raise ValueError(
                f"prompt {info.prompt_id} is in the splits {other!r} and {info.split!r}; splits must be disjoint."
            )
        if bool((input_ids == self.mask_token_id).any()):
            raise ValueError(
                f"document {info.doc_id} contains the mask token {self.mask_token_id}; choose a mask_token_id that "
                "never occurs in text."
            )

    def structure(self) -> dict[str, Any]:
        """Every field that decides what the numbers mean; two jobs may share a folder only if these agree."""
        verifier = asdict(self.verifier)
        for where_it_lay in ("name", "path", "revision"):
            verifier.pop(where_it_lay)
        return {
            **{f"verifier.{k}": v for k, v in verifier.items()},
            "aux_layer_ids": self.aux_layer_ids,
            "aux_convention": self.aux_convention,
            "mask_token_id": self.mask_token_id,
            "last": self.last,
            "dtypes": self.dtypes,
            "dataset": self.dataset,
            "format_version": self.format_version,
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse a manifest file.

        Raises:
            ValueError: if it is damaged or of another format version.
        """
        try:
            values = json.loads(path.read_text())
            version = values["format_version"]
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a cache manifest ({error}); collect into a new folder."
            ) from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}, this release reads {FORMAT_VERSION}; collect again."
            )
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"{path} has unknown keys {unknown}; it was written by {values.get('producer')}."
            )
        verifier = values["verifier"]
        values["verifier"] = VerifierInfo(**{**verifier, "eos_token_ids": tuple(verifier["eos_token_ids"])})
        values["aux_layer_ids"] = tuple(values["aux_layer_ids"])
        values["shards"] = tuple(ShardInfo(**s) for s in values["shards"])
        if values["verifier_file"]:
            values["verifier_file"] = ShardInfo(**values["verifier_file"])
        return cls(**values)


def document_id(
    input_ids: Sequence[int] | Tensor, loss_mask: Sequence[bool] | Tensor, *, temperature: float
) -> str:
    """Content hash of a document: its tokens, which of them were generated, and at which temperature."""
    ids = np.asarray(input_ids, dtype=np.int32).tobytes()
    mask = np.asarray(loss_mask, dtype=np.uint8).tobytes()
    return hashlib.sha256(ids + b"|" + mask + b"|" + f"{temperature:.4f}".encode()).hexdigest()[:20]


def document_bytes(tokens: int, *, num_aux_layers: int, hidden_size: int) -> int:
    """Bytes one document of `tokens` tokens takes in a shard, header included."""
    return tokens * (4 + 1 + 4 + 2 * hidden_size * (num_aux_layers + 1)) + DOCUMENT_OVERHEAD


class FeatureWriter:
    """Writes a cache folder shard by shard; opening a folder again continues it.

    `add` after `resume` skips nothing by itself: ask `doc_id in writer`. Use as a context manager or call `close`, which
    writes the manifest; until then readers see the folder as unfinished (or as it was before it was reopened).
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Manifest,
        *,
        shard_bytes: int,
        byte_budget: int | None = None,
        max_bad_fraction: float = 0.01,
    ) -> None:
        """Begin or continue the cache at `path`.

        `byte_budget` bounds the whole folder; `max_bad_fraction` is the share of documents with non-finite states above
        which `close` refuses (skipped documents are counted either way).

        Raises:
            ValueError: if the folder holds a cache whose structural fields differ, naming each with both values.
        """
        self.path = Path(path)
        self.manifest = manifest
        self._shard_bytes, self._budget, self._max_bad = shard_bytes, byte_budget, max_bad_fraction
        self.skipped: Counter[str] = Counter()
        self.stopped = "complete"
        self._infos: dict[str, DocumentInfo] = {}
        self._shards: list[ShardInfo] = []
        self._pending: list[Document] = []
        self._pending_bytes = 0
        self._writers = ThreadPoolExecutor(THREADS)
        self._writing: deque[Future[ShardInfo]] = deque()
        self._writing_bytes: deque[int] = deque()
        self.path.mkdir(parents=True, exist_ok=True)
        self._continue()
        self._splits_of_prompt = {i.prompt_id: i.split for i in self._infos.values()}
        self._next_shard = 1 + max((int(s.file[6:11]) for s in self._shards), default=-1)
        self.resumed = len(self._infos)
        _write_text(self.path / UNFINISHED, manifest.to_json())

    def __contains__(self, doc_id: str) -> bool:
        return doc_id in self._infos

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        self._writers.shutdown()

    @property
    def bytes_written(self) -> int:
        weights = self.path / VERIFIER_FILE
        return (
            sum(s.bytes for s in self._shards)
            + sum(self._writing_bytes)
            + self._pending_bytes
            + (weights.stat().st_size if weights.exists() else 0)
        )

    def write_verifier(self, verifier: Verifier) -> None:
        """Store the frozen tensors a draft shares: embeddings, final norm, and the head unless it is tied."""
        if not (self.path / VERIFIER_FILE).exists():
            self.write_frozen(frozen_weights(verifier), verifier.info.weights_sha)

    def write_frozen(self, weights: dict[str, Tensor], weights_sha: str) -> None:
        """The same, of a verifier that is known by these tensors alone."""
        _save_tensors(self.path / VERIFIER_FILE, weights, {"weights_sha": weights_sha})

    def add(self, document: Document) -> bool:
        """Append a document. Returns False, and keeps it out, once the byte budget would be passed.

        Documents with NaN or infinite states are skipped and counted under `skipped["not_finite"]`.

        Raises:
            ValueError: if tensor shapes disagree with the manifest or a prompt would be in two splits.
        """
        self._check(document)
        info = document.info
        if info.doc_id in self._infos:
            self.skipped["duplicate"] += 1
            return True
        if not finite(document):
            self.skipped["not_finite"] += 1
            log.warning("document %s has NaN or infinite hidden states; skipped", info.doc_id)
            return True
        size = document_bytes(
            info.tokens,
            num_aux_layers=len(self.manifest.aux_layer_ids),
            hidden_size=self.manifest.verifier.hidden_size,
        )
        if self._budget is not None and self.bytes_written + size > self._budget:
            self.stopped = "byte_budget"
            return False
        self._infos[info.doc_id] = info
        self._splits_of_prompt[info.prompt_id] = info.split
        self._pending.append(document)
        self._pending_bytes += size
        if self._pending_bytes >= self._shard_bytes:
            self._hand_over()
            # Under a budget, which document is the last one must not depend on how far the writing is.
            self._wait(THREADS - 1 if self._budget is None else 0)
        return True

    def flush(self) -> None:
        """Write the pending documents as one shard; from here on a kill cannot lose them."""
        self._hand_over()
        self._wait(0)

    def _hand_over(self) -> None:
        """Let a thread write the pending documents, so that the next ones are captured meanwhile."""
        if not self._pending:
            return
        target = self.path / f"shard-{self._next_shard:05d}.safetensors"
        self._writing.append(self._writers.submit(_write_shard, target, self._pending))
        self._writing_bytes.append(self._pending_bytes)
        self._next_shard += 1
        self._pending, self._pending_bytes = [], 0

    def _wait(self, remaining: int) -> None:
        """Until at most `remaining` shards are still being written; what went wrong with one is raised here."""
        while len(self._writing) > remaining:
            self._shards.append(self._writing.popleft().result())
            self._writing_bytes.popleft()

    def close(self, *, skipped: Mapping[str, int] | None = None) -> Manifest:
        """Write the last shard and the manifest. `skipped` adds counts of documents that never reached the writer.

        Raises:
            ValueError: if nothing was written, or too many documents had non-finite states.
        """
        self.flush()
        bad, seen = self.skipped["not_finite"], len(self._infos) + self.skipped["not_finite"]
        if seen and bad / seen > self._max_bad:
            raise ValueError(
                f"{bad} of {seen} documents had NaN or infinite hidden states, more than the allowed share of "
                f"{self._max_bad:g}. Check the verifier's dtype, or raise max_bad_fraction."
            )
        if not self._infos:
            raise ValueError(
                f"no document was written to {self.path}; skipped: {dict(self.skipped) or 'nothing'}."
            )
        manifest = self.manifest.counted(
            list(self._infos.values()),
            skipped={k: v for k, v in sorted((self.skipped + Counter(skipped or {})).items()) if v},
            stopped=self.stopped,
            shards=tuple(self._shards),
            verifier_file=_describe_file(self.path / VERIFIER_FILE, 0, 0),
        )
        _write_text(self.path / MANIFEST, manifest.to_json())
        (self.path / UNFINISHED).unlink(missing_ok=True)
        self.manifest = manifest
        return manifest

    def _continue(self) -> None:
        recorded: dict[str, ShardInfo] = {}
        for name in (UNFINISHED, MANIFEST):
            if (self.path / name).exists():
                earlier = Manifest.read(self.path / name)
                recorded = {s.file: s for s in earlier.shards}
                mine, theirs = (
                    json_round_trip(self.manifest.structure()),
                    json_round_trip(earlier.structure()),
                )
                differing = [k for k in mine if mine[k] != theirs.get(k)]
                if differing:
                    rows = "; ".join(f"{k}: {mine[k]!r} now, {theirs.get(k)!r} there" for k in differing)
                    raise ValueError(
                        f"{self.path} holds a cache of another kind ({rows}). Choose another name or delete the folder."
                    )
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink()
        for file in sorted(self.path.glob("shard-*.safetensors")):
            if file.name in recorded:
                _verify_file(self.path, recorded[file.name], hashed=True)
            infos = _shard_documents(file)
            self._infos.update({i.doc_id: i for i in infos})
            self._shards.append(
                recorded.get(file.name) or _describe_file(file, len(infos), sum(i.tokens for i in infos))
            )

    def _check(self, document: Document) -> None:
        info, manifest = document.info, self.manifest
        tokens, hidden, layers = info.tokens, manifest.verifier.hidden_size, len(manifest.aux_layer_ids)
        expected = {
            "input_ids": (tokens,),
            "loss_mask": (tokens,),
            "aux": (tokens, layers, hidden),
            "last": (tokens, hidden),
            "lse": (tokens,),
        }
        for name, shape in expected.items():
            found = tuple(getattr(document, name).shape)
            if found != shape:
                raise ValueError(
                    f"document {info.doc_id}: {name} has shape {found}; {tokens} tokens need {shape}."
                )
        manifest.check_document(info, document.input_ids, self._splits_of_prompt)


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda amount: None


class Features(ABC):
    """Documents with hidden states, read by number.

    `path` is where they come from and `name` what that is called in messages. `device` is where hidden states are made, None
    where they are read into host memory. `progress(label, total)` shows how far long work is: a context that yields the
    function to advance it with.
    """

    name: str
    device: torch.device | None = None

    def __init__(self, path: Path, manifest: Manifest, infos: list[DocumentInfo]) -> None:
        self.path, self.manifest = path, manifest
        self._infos = infos
        self.progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]] = no_progress

    @abstractmethod
    def __getitem__(self, index: int) -> Document:
        """One document, in host memory."""

    @abstractmethod
    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`input_ids` int64 [S] and `loss_mask` bool [S] alone, without the hidden states."""

    @abstractmethod
    def packed(self, documents: Sequence[int], device: torch.device) -> Iterator[Packed]:
        """The features of all `documents` in portions on their way to `device`, in whichever order is fastest."""

    @abstractmethod
    def verifier_weights(self) -> dict[str, Tensor]:
        """`embed_tokens.weight` [W, H], `norm.weight` [H], `lm_head.weight` [W, H] (the same tensor where tied)."""

    @abstractmethod
    def _view(self, manifest: Manifest, columns: list[int]) -> Features:
        """The same documents under `manifest`, with these columns of the present `aux`."""

    @abstractmethod
    def hold(self, documents: Sequence[int]) -> None:
        """Keep `documents` in host memory where reading them later would cost more than that."""

    @abstractmethod
    def release(self) -> None:
        """Give back device memory that reading takes; documents can still be read."""

    def origin(self) -> dict[str, str]:
        """What a run records about where its documents came from."""
        return {self.name: str(self.path)}

    def contract(self) -> Contract:
        """The facts that a draft trained on these documents must share with them."""
        return self.manifest.contract()

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def info(self, index: int) -> DocumentInfo:
        return self._infos[index]

    def select(
        self, *, split: str | None = None, domain: str | None = None, temperature: float | None = None
    ) -> list[int]:
        """Numbers of the documents that match every given property, in order."""
        return [
            i
            for i, info in enumerate(self._infos)
            if (split is None or info.split == split)
            and (domain is None or info.domain == domain)
            and (temperature is None or math.isclose(info.temperature, temperature))
        ]

    def greedy_first(self, split: str) -> list[int]:
        """The split's greedy answers where it has any, else all its documents.

        Acceptance of greedy and of sampled text are two numbers (published tables keep them apart): a mean over both depends on
        how they were mixed.
        """
        return self.select(split=split, temperature=0.0) or self.select(split=split)

    def with_taps(self, layer_ids: Sequence[int]) -> Features:
        """The same documents as if only these layers had been captured: they and the manifest carry `layer_ids` alone.

        Raises:
            ValueError: if a layer was not captured, or the ids do not increase.
        """
        stored = list(self.manifest.aux_layer_ids)
        if list(layer_ids) == stored:
            return self
        wanted = [int(i) for i in layer_ids]
        if not wanted or wanted != sorted(set(wanted)) or not set(wanted) <= set(stored):
            raise ValueError(
                f"aux_layer_ids {wanted} cannot be read from {self.name} {self.path}, which holds {stored}; name some of these in "
                "ascending order, or set verifier.aux_layer_ids (and collect again)."
            )
        return self._view(
            replace(self.manifest, aux_layer_ids=tuple(wanted)), [stored.index(i) for i in wanted]
        )

    def for_draft(self, contract: Contract) -> Features:
        """With the layers that a draft reads; unchanged where one is lacking, for `Contract.check` to say so."""
        wanted = contract.aux_layer_ids
        captured = wanted is not None and set(wanted) <= set(self.manifest.aux_layer_ids)
        return self.with_taps(wanted) if captured else self


class FeatureCache(Features):
    """Read access to a cache. Documents are memory-mapped; indexing costs no copy of the hidden states."""

    name = "cache"

    def __init__(
        self, path: Path, manifest: Manifest, infos: list[DocumentInfo], places: list[tuple[int, int]]
    ) -> None:
        super().__init__(path, manifest, infos)
        self._places = places
        self._handles: dict[int, Any] = {}
        self._taps: list[int] | None = None  # columns of the stored `aux`; None: all

    @classmethod
    def open(cls, path: str | Path, *, verify: str = "hash") -> FeatureCache:
        """Open the cache at `path`.

        `verify="hash"` reads every byte once, compares sha256 sums and recomputes some targets (`check_targets`);
        `"sizes"` compares file sizes and document counts only.

        Raises:
            ValueError: if there is no finished cache, or a file is missing, cut short or damaged, naming it.
        """
        path = Path(path)
        if verify not in ("hash", "sizes"):
            raise ValueError(f"verify is {verify!r}; expected 'hash' or 'sizes'.")
        if not (path / MANIFEST).is_file():
            state = (
                "an unfinished cache; run the same collect command again to finish it"
                if (path / UNFINISHED).exists()
                else "no cache; `python -m experiments.collect` writes one"
            )
            raise ValueError(f"{path} holds {state}.")
        manifest = Manifest.read(path / MANIFEST)
        if manifest.verifier_file is None:
            raise ValueError(f"{path / MANIFEST} lists no {VERIFIER_FILE}; collect again.")
        _verify_files(path, (*manifest.shards, manifest.verifier_file), hashed=verify == "hash")
        infos: list[DocumentInfo] = []
        places: list[tuple[int, int]] = []
        for s, shard in enumerate(manifest.shards):
            documents = _shard_documents(path / shard.file)
            if len(documents) != shard.documents:
                raise ValueError(
                    f"{path / shard.file} holds {len(documents)} documents, the manifest says {shard.documents}; {_REPAIR}"
                )
            infos += documents
            places += [(s, d) for d in range(len(documents))]
        if len(infos) != manifest.documents:
            raise ValueError(
                f"{path} holds {len(infos)} documents, its manifest says {manifest.documents}; collect again."
            )
        cache = cls(path, manifest, infos, places)
        if verify == "hash":
            cache.check_targets()
        return cache

    def __getitem__(self, index: int) -> Document:
        shard, d = self._places[index]
        handle = self._handle(shard)

        def tensor(name: str) -> Tensor:
            return handle.get_tensor(f"{d:05d}.{name}")

        return Document(
            input_ids=tensor("input_ids").long(),
            loss_mask=tensor("loss_mask"),
            aux=tensor("aux") if self._taps is None else tensor("aux")[:, self._taps],
            last=tensor("last"),
            lse=tensor("lse"),
            info=self._infos[index],
        )

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        shard, d = self._places[index]
        handle = self._handle(shard)
        return handle.get_tensor(f"{d:05d}.input_ids").long(), handle.get_tensor(f"{d:05d}.loss_mask")

    def packed(self, documents: Sequence[int], device: torch.device) -> Iterator[Packed]:
        """Portions in the order of the files, read ahead by a few threads; in pinned memory where `device` is a GPU."""
        width = 2 * self.manifest.verifier.hidden_size * (len(self.manifest.aux_layer_ids) + 1) + 4
        portions: list[list[int]] = []
        room = 0
        for number in sorted(documents, key=self._places.__getitem__):
            size = width * self.info(number).tokens
            if size > room:
                portions.append([])
                room = PORTION_BYTES
            portions[-1].append(number)
            room -= size

        def read(numbers: list[int]) -> Packed:
            found = [self[i] for i in numbers]

            def joined(name: str) -> Tensor:
                parts = [getattr(d, name) for d in found]
                shape = (sum(map(len, parts)), *parts[0].shape[1:])
                out = torch.empty(shape, dtype=parts[0].dtype, pin_memory=device.type == "cuda")
                return torch.cat(parts, out=out)

            return Packed(numbers, joined("aux"), joined("last"), joined("lse"))

        with ThreadPoolExecutor(THREADS) as pool:
            ahead = deque(pool.submit(read, numbers) for numbers in portions[:THREADS])
            for numbers in portions[THREADS:]:
                yield ahead.popleft().result()
                ahead.append(pool.submit(read, numbers))
            while ahead:
                yield ahead.popleft().result()

    def hold(self, documents: Sequence[int]) -> None:
        """Documents are mapped from their files; nothing is kept."""

    def release(self) -> None:
        """Reading takes no device memory."""

    def _view(self, manifest: Manifest, columns: list[int]) -> FeatureCache:
        view = FeatureCache(self.path, manifest, self._infos, self._places)
        view._taps = columns if self._taps is None else [self._taps[c] for c in columns]
        view.progress = self.progress
        return view

    def verifier_weights(self) -> dict[str, Tensor]:
        with safe_open(self.path / VERIFIER_FILE, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
        return weights

    def check_targets(self, *, documents: int = 4, rows: int = 8) -> None:
        """Recompute `lse` from `last`, the norm the manifest states and the head, on a few rows of a few documents.

        A state stored on the wrong side of the final norm, a foreign head or a missing logit scale all show here.

        Raises:
            ValueError: if a value differs by more than 0.01 + 0.1 %.
        """
        picked = sorted(
            {round(i * (len(self) - 1) / max(1, documents - 1)) for i in range(min(documents, len(self)))}
        )
        weights = self.verifier_weights()
        for index in picked:
            document = self[index]
            at = torch.linspace(0, document.info.tokens - 1, min(rows, document.info.tokens)).long()
            found = target_lse(document.last[at], weights, self.manifest)
            worst = (found - document.lse[at]).abs().sub(0.001 * document.lse[at].abs()).max().item()
            if not worst <= 0.01:
                raise ValueError(
                    f"{self.path}: document {document.info.doc_id}: the stored log-sum-exp differs by {worst:.3g} from what "
                    f"its last hidden state (recorded as {self.manifest.last}) gives with the stored head. The states are "
                    "on the other side of the final norm, or of another verifier; collect again."
                )

    def __getstate__(self) -> dict[str, Any]:
        # Neither open files nor a progress display can go to another process.
        return {**self.__dict__, "_handles": {}, "progress": no_progress}

    def _handle(self, shard: int) -> Any:
        if shard not in self._handles:
            self._handles[shard] = safe_open(self.path / self.manifest.shards[shard].file, framework="pt")
        return self._handles[shard]


def finite(document: Document) -> bool:
    """Whether every feature of a document is a number."""
    return all(
        # A finite sum has finite terms, and one pass without temporaries shows it; huge terms may still overflow a sum.
        bool(t.sum(dtype=torch.float32).isfinite()) or bool(t.isfinite().all())
        for t in (document.aux, document.last, document.lse)
    )


def frozen_weights(verifier: Verifier) -> dict[str, Tensor]:
    """The tensors that a draft shares, on the CPU: embeddings, final norm, and the head unless it is tied."""
    weights = {"embed_tokens.weight": verifier.embed_weight(), "norm.weight": verifier.final_norm_weight()}
    if not verifier.info.tied:
        weights["lm_head.weight"] = verifier.head_weight()
    return {name: weight.cpu().contiguous() for name, weight in weights.items()}


def target_lse(
    last: Tensor, weights: Mapping[str, Tensor], manifest: Manifest, *, columns: int = 16384
) -> Tensor:
    """fp32 [rows]: log-sum-exp over the whole vocabulary of the logits that stored states `last` [rows, H] stand for."""
    x = last.float()
    if manifest.last == "pre_norm":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + manifest.verifier.rms_norm_eps)
        x = (x * weights["norm.weight"].float()).to(torch.bfloat16).float()
    parts = [
        (manifest.verifier.logit_scale * (x @ part.float().T)).logsumexp(-1)
        for part in weights["lm_head.weight"].split(columns)
    ]
    return torch.stack(parts).logsumexp(0)


_REPAIR = "delete that file and run the same collect command again; it rewrites only what is missing."


def json_round_trip(values: Any) -> Any:
    """`values` as JSON would give them back (tuples become lists), so that comparisons ignore the container."""
    return json.loads(json.dumps(values))


def _shard_documents(file: Path) -> list[DocumentInfo]:
    try:
        with safe_open(file, framework="pt") as handle:
            return [DocumentInfo(**d) for d in json.loads(handle.metadata()["documents"])]
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); {_REPAIR}") from error


def _verify_files(folder: Path, parts: Sequence[ShardInfo], *, hashed: bool) -> None:
    """`_verify_file` for each, several at a time: one core hashes slower than most disks read."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda part: _verify_file(folder, part, hashed=hashed), parts):
            pass


def _verify_file(folder: Path, part: ShardInfo, *, hashed: bool) -> None:
    file = folder / part.file
    if not file.is_file():
        raise ValueError(
            f"{file} is missing; run the same collect command again; it rewrites only what is missing."
        )
    size = file.stat().st_size
    if size != part.bytes:
        raise ValueError(f"{file} has {size} bytes, its manifest says {part.bytes}; {_REPAIR}")
    if hashed and (found := _sha256(file)) != part.sha256:
        raise ValueError(
            f"{file} is damaged: sha256 {found[:16]}..., its manifest says {part.sha256[:16]}...; {_REPAIR}"
        )


def _describe_file(file: Path, documents: int, tokens: int) -> ShardInfo:
    return ShardInfo(
        file=file.name, sha256=_sha256(file), documents=documents, tokens=tokens, bytes=file.stat().st_size
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_shard(target: Path, documents: Sequence[Document]) -> ShardInfo:
    """Write documents in the safetensors format, hashing the bytes on their way: nothing is copied or read again."""
    # Wider elements first, so that every tensor is aligned in the file.
    kinds = {"lse": torch.float32, "input_ids": torch.int32, "aux": torch.bfloat16, "last": torch.bfloat16}
    names = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.bool: "BOOL"}
    header: dict[str, Any] = {"__metadata__": {"documents": json.dumps([asdict(d.info) for d in documents])}}
    parts, at = [], 0
    for kind, dtype in (kinds | {"loss_mask": torch.bool}).items():
        for d, document in enumerate(documents):
            tensor = getattr(document, kind).to("cpu", dtype).contiguous()
            end = at + tensor.nbytes
            header[f"{d:05d}.{kind}"] = {
                "dtype": names[dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            parts.append(tensor.flatten().view(torch.uint8).numpy())
            at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    temporary = target.with_name(target.name + ".tmp")
    with temporary.open("wb") as stream:
        for part in (len(text).to_bytes(8, "little"), text, *parts):
            digest.update(part)
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(target)
    return ShardInfo(
        file=target.name,
        sha256=digest.hexdigest(),
        documents=len(documents),
        tokens=sum(d.info.tokens for d in documents),
        bytes=8 + len(text) + at,
    )


def _save_tensors(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = target.with_name(target.name + ".tmp")
    save_file(tensors, temporary, metadata=metadata)
    temporary.chmod(0o644)  # safetensors writes for the owner alone; caches are shared
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.rename(target)


def _write_text(target: Path, text: str) -> None:
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(text)
    temporary.rename(target)
