"""Documents whose hidden states the verifier computes when they are asked for: training without a cache on disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from dspark.data.capture import capture_batch, capture_packed, length_batches
from dspark.data.features import Document, DocumentInfo, Features, Manifest, Packed, finite, frozen_weights
from dspark.data.responses import TokenDocument
from dspark.verifier import Verifier

KEPT_BYTES = 4 << 30  # hidden states of documents read by number that stay in host memory


class OnlineFeatures(Features):
    """A token-level set read as a cache of it would be, with the same numbers up to the rounding of other batch shapes."""

    name = "token set"

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        verifier: Verifier,
        tokens: Sequence[TokenDocument],
        *,
        tokens_per_batch: int,
    ) -> None:
        """`manifest` describes what is captured; its counts are filled in here. A forward pass takes `tokens_per_batch` tokens
        with their padding. Documents that are there twice count once.

        Raises:
            ValueError: if a prompt is in two splits, or a text contains the mask token.
        """
        found: dict[str, tuple[DocumentInfo, TokenDocument]] = {}
        splits: dict[str, str] = {}
        for document in tokens:
            info = document.info()
            found.setdefault(info.doc_id, (info, document))
        infos = [info for info, _ in found.values()]
        super().__init__(path, manifest.counted(infos), infos)
        self._documents = [document for _, document in found.values()]
        self._ends = list(accumulate(info.tokens for info in infos))
        self._ids = torch.tensor([token for d in self._documents for token in d.input_ids])
        self._mask = torch.tensor([trained for d in self._documents for trained in d.loss_mask])
        for index, info in enumerate(infos):
            manifest.check_document(info, self.tokens(index)[0], splits)
            splits[info.prompt_id] = info.split
        self.verifier, self.device = verifier, verifier.device
        self.tokens_per_batch = tokens_per_batch
        self._held: dict[int, Document] = {}
        self._kept_bytes = 0

    def __getitem__(self, index: int) -> Document:
        """Held-out documents are read at every validation and by every cell of a sweep, so they are captured once, each by itself,
        as far as `KEPT_BYTES` allow."""
        document = self._held.get(index)
        if document is None:
            (document,) = self._captured([index])
            size = document.aux.nbytes + document.last.nbytes + document.lse.nbytes
            if self._kept_bytes + size <= KEPT_BYTES:
                self._held[index] = document
                self._kept_bytes += size
        return document

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        own = slice(self._ends[index] - self.info(index).tokens, self._ends[index])
        return self._ids[own], self._mask[own]

    def packed(self, documents: Sequence[int], device: torch.device) -> Iterator[Packed]:
        """One forward pass a portion, documents of like length together; the states stay on the verifier's device."""
        self._wake()
        for numbers in self._batches(documents):
            states = capture_packed(
                self.verifier,
                [self._documents[i] for i in numbers],
                aux_layer_ids=self.manifest.aux_layer_ids,
            )
            yield Packed(numbers, states.aux, states.last, states.lse)

    def verifier_weights(self) -> dict[str, Tensor]:
        weights = frozen_weights(self.verifier)
        weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
        return weights

    def hold(self, documents: Sequence[int]) -> None:
        for numbers in self._batches([d for d in documents if d not in self._held]):
            self._held.update(zip(numbers, self._captured(numbers), strict=True))

    def release(self) -> None:
        """Move the verifier into host memory, until a document that is not held is read."""
        self.verifier.model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def origin(self) -> dict[str, str]:
        return {"token_set": str(self.path)}

    def _view(self, manifest: Manifest, columns: list[int]) -> OnlineFeatures:
        view = copy.copy(self)  # captures the layers of its manifest, so the columns do not matter
        view.manifest, view._held, view._kept_bytes = manifest, {}, 0
        return view

    def _wake(self) -> None:
        if self.verifier.device != self.device:
            self.verifier.model.to(self.device)

    def _batches(self, documents: Sequence[int]) -> list[list[int]]:
        lengths = [self.info(d).tokens for d in documents]
        batches = length_batches(lengths, tokens_per_batch=self.tokens_per_batch, seed=0)
        return [[documents[i] for i in batch] for batch in batches]

    def _captured(self, numbers: Sequence[int]) -> list[Document]:
        """Documents of one forward pass.

        Raises:
            ValueError: if a state is not a number; training rows leave such documents out, a held-out one has no stand-in.
        """
        self._wake()
        documents = capture_batch(
            self.verifier,
            [self._documents[i] for i in numbers],
            aux_layer_ids=self.manifest.aux_layer_ids,
        )
        for document in documents:
            if not finite(document):
                raise ValueError(
                    f"{self.verifier.info.name} gives NaN or infinite hidden states for document {document.info.doc_id} in "
                    f"{self.verifier.info.compute_dtype}; try verifier.compute_dtype=float32."
                )
        return documents
