"""From cached documents to training batches: packing, anchors, and an order that a resumed run repeats exactly.

Every batch is a pure function of (seed, epoch, row): documents are shuffled by (seed, epoch), packed in that order into rows of
`seq_length` tokens, and anchors are drawn by (seed, epoch, row). Position in the stream is therefore one number, and a run
resumed at batch k sees what the uninterrupted run would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from dspark.blocks import DraftBatch, anchor_candidates, sample_anchors
from dspark.data.features import Document, FeatureCache


def pack_rows(
    lengths: Mapping[int, int], order: Sequence[int], seq_length: int, max_open: int = 16
) -> list[list[int]]:
    """Rows of document numbers whose lengths add up to at most `seq_length`; longer documents count as cropped to it.

    First-fit over the last `max_open` unfinished rows, in the given order: deterministic, and close to full rows.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (row, space left)
    for document in order:
        need = min(lengths[document], seq_length)
        for place, (row, left) in enumerate(open_rows):
            if need <= left:
                rows[row].append(document)
                open_rows[place] = (row, left - need)
                break
        else:
            rows.append([document])
            open_rows.append((len(rows) - 1, seq_length - need))
            if len(open_rows) > max_open:
                open_rows.remove(min(open_rows, key=lambda entry: entry[1]))
    return rows


def collate_documents(
    documents: Sequence[Document], seq_length: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One packed row [1, seq_length] of every per-token tensor of `DraftBatch`; the tail is padding without loss."""
    first = documents[0]
    layers, hidden = first.aux.shape[1:]
    row = pack_tokens([(d.input_ids, d.loss_mask) for d in documents], seq_length) | {
        "aux": torch.zeros(seq_length, layers, hidden, dtype=dtype),
        "last": torch.zeros(seq_length, hidden, dtype=dtype),
        "lse": torch.zeros(seq_length),
    }
    at = 0
    for document in documents:
        end = min(at + len(document.input_ids), seq_length)
        span = slice(0, end - at)
        row["aux"][at:end] = document.aux[span]
        row["last"][at:end] = document.last[span]
        row["lse"][at:end] = document.lse[span]
        at = end
    return {name: tensor.unsqueeze(0) for name, tensor in row.items()}


def pack_tokens(documents: Sequence[tuple[Tensor, Tensor]], seq_length: int) -> dict[str, Tensor]:
    """`input_ids`, `positions`, `doc_start` and `loss_mask` [seq_length] of documents given as (ids, mask), end to end."""
    row = {
        "input_ids": torch.zeros(seq_length, dtype=torch.int64),
        "positions": torch.zeros(seq_length, dtype=torch.int64),
        "doc_start": torch.arange(seq_length),
        "loss_mask": torch.zeros(seq_length, dtype=torch.bool),
    }
    at = 0
    for ids, mask in documents:
        end = min(at + len(ids), seq_length)
        row["input_ids"][at:end] = ids[: end - at]
        row["positions"][at:end] = torch.arange(end - at)
        row["doc_start"][at:end] = at
        row["loss_mask"][at:end] = mask[: end - at]
        at = end
    return row


class ResidentFeatures:
    """The features of some documents in one device's memory, so that a row is a gather there and nothing is copied to it.

    A GPU's training step is shorter than reading, packing and moving its features from disk; a cache that fits in the
    device's memory need not be read twice.
    """

    def __init__(self, cache: FeatureCache, documents: Sequence[int], device: torch.device | str) -> None:
        """Load `documents`. Those with NaN or infinite features are kept out and counted in `bad`."""
        self.tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self.first: dict[int, int] = {}
        self.bad = 0
        total = sum(cache.info(d).tokens for d in documents)
        manifest = cache.manifest
        layers, hidden = len(manifest.aux_layer_ids), manifest.verifier.hidden_size
        # Row 0 stays zero: padding reads it.
        self.aux = torch.zeros(total + 1, layers, hidden, dtype=torch.bfloat16, device=device)
        self.last = torch.zeros(total + 1, hidden, dtype=torch.bfloat16, device=device)
        self.lse = torch.zeros(total + 1, device=device)
        at = 1
        for number in documents:
            document = cache[number]
            if not finite(document):
                self.bad += 1
                continue
            end = at + len(document.input_ids)
            for store in ("aux", "last", "lse"):
                getattr(self, store)[at:end] = getattr(document, store).to(device)
            self.tokens[number] = (document.input_ids, document.loss_mask)
            self.first[number] = at
            at = end

    @staticmethod
    def bytes_needed(cache: FeatureCache, documents: Sequence[int]) -> int:
        manifest = cache.manifest
        width = 2 * manifest.verifier.hidden_size * (len(manifest.aux_layer_ids) + 1) + 4
        return width * sum(cache.info(d).tokens for d in documents)

    def row(self, documents: Sequence[int], seq_length: int) -> dict[str, Tensor]:
        """A packed row as `collate_documents` makes it, features on the device and tokens on the CPU."""
        held = [d for d in documents if d in self.first]
        tokens = pack_tokens([self.tokens[d] for d in held], seq_length)
        source = torch.zeros(seq_length, dtype=torch.int64)
        at = 0
        for d in held:
            end = min(at + len(self.tokens[d][0]), seq_length)
            source[at:end] = torch.arange(self.first[d], self.first[d] + end - at)
            at = end
        source = source.to(self.aux.device, non_blocking=True)
        features = {"aux": self.aux[source], "last": self.last[source], "lse": self.lse[source]}
        return {name: tensor.unsqueeze(0) for name, tensor in (tokens | features).items()}


def all_anchors(document_batch: dict[str, Tensor], limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Every anchor that a round could start from in one row, ascending [1, A], and a mask of ones."""
    places = (
        anchor_candidates(document_batch["loss_mask"], document_batch["doc_start"])[0].nonzero().squeeze(-1)
    )
    anchors = places[:limit].unsqueeze(0)
    return anchors, torch.ones_like(anchors, dtype=torch.bool)


class PackedRows(Dataset):
    """Training rows by global index. Rows of an epoch without a single usable anchor are still rows: they weigh nothing."""

    def __init__(
        self,
        cache: FeatureCache,
        documents: Sequence[int],
        *,
        seq_length: int,
        anchors: int,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        if not documents:
            raise ValueError(
                "no training documents: the cache's `train` split is empty. Collect more prompts."
            )
        self.cache, self.documents = cache, list(documents)
        self.seq_length, self.anchors, self.seed, self.dtype = seq_length, anchors, seed, dtype
        self.lengths = {d: cache.info(d).tokens for d in self.documents}
        self.bad_documents = 0
        self.resident: ResidentFeatures | None = None
        self._epoch_rows: dict[int, list[list[int]]] = {}
        self.rows_per_epoch = len(self.rows(0))

    @property
    def cropped(self) -> int:
        """Documents longer than a row, whose tails are not trained on."""
        return sum(length > self.seq_length for length in self.lengths.values())

    def rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epoch_rows:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.documents).tolist()
            rows = pack_rows(self.lengths, order, self.seq_length)
            # Packing decides the row count; a fixed count an epoch keeps `index -> (epoch, row)` a division.
            count = len(rows) if epoch == 0 else self.rows_per_epoch
            rows = (rows + rows)[:count]
            self._epoch_rows = {epoch: rows}
        return self._epoch_rows[epoch]

    def steps_for(self, tokens: int, rows_per_step: int) -> int:
        """Optimizer steps until `tokens` document tokens were seen, each step taking the next `rows_per_step` rows.

        Padding and what a row crops do not count. Rows are a function of the seed, so this needs no training.
        """
        seen, row = 0, 0
        while seen < tokens:
            epoch, place = divmod(row, self.rows_per_epoch)
            documents = self.rows(epoch)[place]
            used = min(sum(min(self.lengths[d], self.seq_length) for d in documents), self.seq_length)
            seen, row = seen + used, row + 1
        return -(-row // rows_per_step)

    def make_resident(self, device: torch.device | str) -> None:
        """Hold all features in `device` memory from here on; rows then come from there."""
        self.resident = ResidentFeatures(self.cache, self.documents, device)
        self.bad_documents += self.resident.bad

    def __getitem__(self, index: int) -> DraftBatch:
        epoch, place = divmod(index, self.rows_per_epoch)
        documents = self.rows(epoch)[place]
        row = (
            self._read(documents) if self.resident is None else self.resident.row(documents, self.seq_length)
        )
        state = np.random.SeedSequence((self.seed, epoch, place)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
        anchors, valid = sample_anchors(row["loss_mask"], row["doc_start"], self.anchors, generator)
        batch = DraftBatch(**row, anchors=anchors, anchor_valid=valid)
        return batch if self.resident is None else batch.to(batch.aux.device, non_blocking=True)

    def _read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        documents = [self.cache[d] for d in numbers]
        sound = [d for d in documents if finite(d)]
        self.bad_documents += len(documents) - len(sound)
        row = collate_documents(sound or documents, self.seq_length, self.dtype)
        if not sound:
            row = {name: torch.nan_to_num(t) if t.is_floating_point() else t for name, t in row.items()}
            row["loss_mask"].zero_()
        return row


def finite(document: Document) -> bool:
    """Whether every feature of a document is a number."""
    return all(bool(t.isfinite().all()) for t in (document.aux, document.last, document.lse))


@dataclass
class StreamSampler(Sampler):
    """Global row indices `start, start+1, ... total-1` for this rank: rank r takes every `world`-th, all ranks equally many.

    A batch is `rows_per_batch` consecutive indices of the rank's share.
    """

    total_batches: int
    rows_per_batch: int
    start_batch: int
    rank: int
    world: int

    def __len__(self) -> int:
        return self.total_batches - self.start_batch

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.start_batch, self.total_batches):
            first = (batch * self.world + self.rank) * self.rows_per_batch
            yield list(range(first, first + self.rows_per_batch))


def stack_rows(rows: list[DraftBatch]) -> DraftBatch:
    """Rows of equal length as one batch [B, S]."""
    if len(rows) == 1:
        return rows[0]
    names = vars(rows[0])
    return DraftBatch(**{name: torch.cat([getattr(row, name) for row in rows]) for name in names})


class HeldOutDocuments(Dataset):
    """One document an item, with every anchor of its response: the input of replay."""

    def __init__(self, cache: FeatureCache, documents: Sequence[int], *, dtype: torch.dtype) -> None:
        self.cache, self.documents, self.dtype = cache, list(documents), dtype

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, place: int) -> tuple[DraftBatch, int]:
        number = self.documents[place]
        document = self.cache[number]
        row = collate_documents([document], len(document.input_ids), self.dtype)
        anchors, valid = all_anchors(row)
        return DraftBatch(**row, anchors=anchors, anchor_valid=valid), number
