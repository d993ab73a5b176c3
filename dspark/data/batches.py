"""From cached documents to training batches: packing, anchors, and an order that a resumed run repeats exactly.

Every batch is a pure function of (seed, epoch, row): documents are shuffled by (seed, epoch), packed in that order into rows of
`seq_length` tokens, and anchors are drawn by (seed, epoch, row). Position in the stream is therefore one number, and a run
resumed at batch k sees what the uninterrupted run would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from dspark.blocks import DraftBatch, anchor_candidates, draw_anchors, sample_anchors
from dspark.data.features import Document, Features, finite


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
    positions, doc_start = row_layout([len(ids) for ids, _ in documents], seq_length)
    row = {
        "input_ids": torch.zeros(seq_length, dtype=torch.int64),
        "positions": torch.from_numpy(positions),
        "doc_start": torch.from_numpy(doc_start),
        "loss_mask": torch.zeros(seq_length, dtype=torch.bool),
    }
    for name, parts in zip(("input_ids", "loss_mask"), zip(*documents, strict=True), strict=False):
        tokens = torch.cat(parts)[:seq_length]
        row[name][: len(tokens)] = tokens
    return row


def row_layout(lengths: Sequence[int] | np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """`positions` and `doc_start` int64 [seq_length] of documents end to end; each padding token is its own document."""
    doc_start = np.arange(seq_length)
    ends = np.minimum(np.cumsum(lengths, dtype=np.int64), seq_length)
    sizes = np.diff(ends, prepend=0)
    doc_start[: sizes.sum()] = np.repeat(ends - sizes, sizes)
    return np.arange(seq_length) - doc_start, doc_start


class ResidentFeatures:
    """The features of some documents in one device's memory, so that a row is a gather there and nothing is copied to it.

    A GPU's training step is shorter than reading, packing and moving its features from disk; features that fit in the
    device's memory need not be read twice.
    """

    def __init__(
        self,
        source: Features,
        documents: Sequence[int],
        device: torch.device | str,
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Load `documents`, or capture them. Those with NaN or infinite features are kept out and counted in `bad`.

        `advance` receives token counts as they arrive. Raises ValueError where a GPU lacks the memory.
        """
        device = torch.device(device)
        total = sum(source.info(d).tokens for d in documents)
        manifest = source.manifest
        layers, hidden = len(manifest.aux_layer_ids), manifest.verifier.hidden_size
        self._check_room((total + 1) * (2 * hidden * (layers + 1) + 4), device)
        # Row 0 stays zero: padding reads it.
        self.aux = torch.zeros(total + 1, layers, hidden, dtype=torch.bfloat16, device=device)
        self.last = torch.zeros(total + 1, hidden, dtype=torch.bfloat16, device=device)
        self.lse = torch.zeros(total + 1, device=device)
        self.ids, self.mask = np.zeros(total + 1, dtype=np.int64), np.zeros(total + 1, dtype=bool)
        self.places: dict[int, tuple[int, int]] = {}  # number -> (first token in the tensors above, tokens)
        flags, at = [], 1
        for part in source.packed(documents, device):
            end = at + len(part.lse)
            for name in ("aux", "last", "lse"):
                getattr(self, name)[at:end].copy_(getattr(part, name), non_blocking=True)
            flags.append(self._sound_tokens(at, end))
            advance(end - at)
            for number in part.documents:
                ids, mask = source.tokens(number)
                own = slice(at, at + len(ids))
                self.places[number] = (at, len(ids))
                self.ids[own], self.mask[own] = ids.numpy(), mask.numpy()
                at += len(ids)
        sound = torch.cat(flags).cpu().numpy()
        starts, lengths = np.array(list(self.places.values())).T
        doc_start = torch.from_numpy(np.concatenate([[0], np.repeat(starts, lengths)]))
        self.candidate = anchor_candidates(torch.from_numpy(self.mask)[None], doc_start[None])[0].numpy()
        whole = np.logical_and.reduceat(sound, starts - 1).tolist()
        self.bad = whole.count(False)
        self.places = {n: place for (n, place), ok in zip(self.places.items(), whole, strict=True) if ok}

    @staticmethod
    def _check_room(need: int, device: torch.device) -> None:
        if device.type != "cuda":
            return
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
        if need > free:
            raise ValueError(
                f"the training features take {need / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free; set "
                "trainer.resident=false, or train on fewer layers (draft.taps) or documents."
            )

    def _sound_tokens(self, at: int, end: int) -> Tensor:
        """bool [end - at]: whether all features of a token are numbers. Times 0 only numbers give 0."""
        parts = (self.aux[at:end].flatten(1), self.last[at:end], self.lse[at:end, None])
        return sum((part * 0).sum(-1, dtype=torch.float32) for part in parts) == 0

    def rows(
        self,
        rows: Sequence[Sequence[int]],
        seq_length: int,
        num_anchors: int,
        generators: Sequence[torch.Generator],
    ) -> DraftBatch:
        """Packed rows as `collate_documents` makes them, with anchors, on the device.

        All integers cross in one transfer: eight small ones a row would cost more than the step's own launches.
        """
        count, device = len(rows), self.aux.device
        tokens, drawn = 5 * count * seq_length, 2 * count * num_anchors
        buffer = torch.empty(tokens + drawn, dtype=torch.int64, pin_memory=device.type == "cuda")
        per_token = buffer[:tokens].view(5, count, seq_length).numpy()
        per_anchor = buffer[tokens:].view(2, count, num_anchors).numpy()
        for b, documents in enumerate(rows):
            held = [self.places[d] for d in documents if d in self.places]
            firsts, lengths = np.array(held, dtype=np.int64).reshape(-1, 2).T
            positions, doc_start = row_layout(lengths, seq_length)
            source = np.zeros(seq_length, dtype=np.int64)
            where = np.repeat(firsts, lengths)[:seq_length]
            source[: len(where)] = where + positions[: len(where)]
            for k, values in enumerate((self.ids[source], positions, doc_start, self.mask[source], source)):
                per_token[k, b] = values
            # What a cropped row ends with has no next token there.
            places = np.flatnonzero(self.candidate[source[:-1]])
            drawn = draw_anchors(places, per_anchor[0, b], generators[b])
            per_anchor[1, b] = np.arange(num_anchors) < drawn
        moved = buffer.to(device, non_blocking=True)
        ids, positions, doc_start, mask, source = moved[:tokens].view(5, count, seq_length)
        anchors, valid = moved[tokens:].view(2, count, num_anchors)
        return DraftBatch(
            input_ids=ids,
            positions=positions,
            doc_start=doc_start,
            loss_mask=mask.bool(),
            aux=self.aux[source],
            last=self.last[source],
            lse=self.lse[source],
            anchors=anchors,
            anchor_valid=valid.bool(),
        )


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
        cache: Features,
        documents: Sequence[int],
        *,
        seq_length: int,
        anchors: int,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        if not documents:
            raise ValueError(
                f"no training documents: the `train` split of {cache.path} is empty. Collect more prompts."
            )
        self.cache, self.documents = cache, list(documents)
        self.seq_length, self.anchors, self.seed, self.dtype = seq_length, anchors, seed, dtype
        self.lengths = {d: cache.info(d).tokens for d in self.documents}
        self.bad_documents = 0
        self.resident: ResidentFeatures | None = None
        self._captures_on = cache.device  # None: features are read into host memory
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

    def make_resident(
        self,
        device: torch.device | str,
        held_out: Sequence[int] = (),
        loaded: ResidentFeatures | None = None,
    ) -> ResidentFeatures:
        """Hold all features in `device` memory from here on; rows then come from there.

        Documents in `held_out` stay readable, but not from device memory. `loaded` is what this returned for other rows of the
        same documents, features and device, which are then in memory once.
        """
        self.cache.hold(held_out)
        if loaded is None:
            with self.cache.progress("features into memory", sum(self.lengths.values())) as advance:
                loaded = ResidentFeatures(self.cache, self.documents, device, advance)
        self.resident = loaded
        self.bad_documents += loaded.bad
        self.cache.release()
        return loaded

    def __getitem__(self, index: int) -> DraftBatch:
        return stack_rows(self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> list[DraftBatch]:
        """What a loader asks for: the rows of a batch, already stacked where they are made on a device."""
        places = [divmod(index, self.rows_per_epoch) for index in indices]
        rows = [self.rows(epoch)[place] for epoch, place in places]
        generators = [self._generator(epoch, place) for epoch, place in places]
        store = self.resident
        if store is None and self._captures_on is not None:
            store = ResidentFeatures(self.cache, sorted({d for row in rows for d in row}), self._captures_on)
            self.bad_documents += store.bad
        if store is not None:
            return [store.rows(rows, self.seq_length, self.anchors, generators)]
        return [self._read(row, generator) for row, generator in zip(rows, generators, strict=True)]

    def _generator(self, epoch: int, place: int) -> torch.Generator:
        state = np.random.SeedSequence((self.seed, epoch, place)).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state >> np.uint64(1)))

    def _read(self, numbers: Sequence[int], generator: torch.Generator) -> DraftBatch:
        documents = [self.cache[d] for d in numbers]
        sound = [d for d in documents if finite(d)]
        self.bad_documents += len(documents) - len(sound)
        row = collate_documents(sound or documents, self.seq_length, self.dtype)
        if not sound:
            row = {name: torch.nan_to_num(t) if t.is_floating_point() else t for name, t in row.items()}
            row["loss_mask"].zero_()
        anchors, valid = sample_anchors(row["loss_mask"], row["doc_start"], self.anchors, generator)
        return DraftBatch(**row, anchors=anchors, anchor_valid=valid)


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

    def __init__(self, cache: Features, documents: Sequence[int], *, dtype: torch.dtype) -> None:
        self.cache, self.documents, self.dtype = cache, list(documents), dtype

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, place: int) -> tuple[DraftBatch, int]:
        number = self.documents[place]
        document = self.cache[number]
        row = collate_documents([document], len(document.input_ids), self.dtype)
        anchors, valid = all_anchors(row)
        return DraftBatch(**row, anchors=anchors, anchor_valid=valid), number
