"""What trainings in one process have in common, so that a cell of a sweep need not do again what the cell before it has done.

Opening features, capturing or loading them into device memory and factorising bigrams can take longer than a short training.
All three are functions of a few settings, and most cells of a grid agree on these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Generic, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dspark.data.batches import PackedRows, ResidentFeatures
from dspark.data.features import Features
from dspark.vocab import VocabMap
from dspark.warm_start import BigramFactors, bigram_counts, factorise_bigrams
from experiments.build import open_features, response_counts, tapped_layers

T = TypeVar("T")


class Newest(Generic[T]):
    """The newest of some expensive values, by what it depends on. The former one is dropped before the next is made."""

    def __init__(self, *derived: Newest) -> None:
        """`derived` are made from this one's values, and dropped with them."""
        self.derived = derived
        self.key: Hashable = None
        self.value: T | None = None

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if self.value is None or key != self.key:
            self.drop()
            self.value, self.key = make(), key
        return self.value

    def drop(self) -> None:
        for other in self.derived:
            other.drop()
        self.key = self.value = None


class Shared:
    """Features, their device memory and what is counted in them, each as the last training asked for it."""

    def __init__(self) -> None:
        self._resident: Newest[ResidentFeatures] = Newest()
        self._tapped: Newest[Features] = Newest(self._resident)
        self._counts: Newest[Tensor] = Newest()
        self._bigrams: Newest[BigramFactors] = Newest()
        self._opened: Newest[Features] = Newest(self._tapped, self._counts, self._bigrams)

    def features(self, cfg: DictConfig) -> Features:
        """What `open_features` gives, with the layers that the draft reads. Seeds have no part in it but `data.seed`."""
        groups = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("verifier", "data")}
        watched = {name: cfg.trainer[name] for name in ("num_workers", "progress")}
        opened = self._opened.get(json.dumps(groups | watched, sort_keys=True), partial(open_features, cfg))
        layers = tapped_layers(cfg, opened.manifest)
        return self._tapped.get(tuple(layers), partial(opened.with_taps, layers))

    def response_counts(self, features: Features, documents: Sequence[int]) -> Tensor:
        return self._counts.get(tuple(documents), partial(response_counts, features, documents))

    def make_resident(self, rows: PackedRows, device: torch.device | str, held_out: Sequence[int]) -> None:
        """`rows.make_resident`, from the memory that an earlier training filled with the same documents and layers."""
        key = (rows.cache, tuple(rows.documents), str(device))
        loaded = self._resident.get(key, partial(rows.make_resident, device, held_out))
        if rows.resident is not loaded:
            rows.make_resident(device, held_out, loaded)

    def bigrams(
        self, features: Features, documents: Sequence[int], vocab: VocabMap, rank: int
    ) -> BigramFactors:
        """The bigrams of the documents' answers, factorised for a head of `rank`."""

        def factorise() -> BigramFactors:
            counted = bigram_counts([features.tokens(d) for d in documents], vocab)
            return factorise_bigrams(*counted, rows=vocab.vocab_size, columns=len(vocab), rank=rank)

        return self._bigrams.get((tuple(documents), tuple(vocab.kept.tolist()), rank), factorise)


@cache
def shared_by_cells() -> Shared:
    """The one that all cells of a sweep share that run in this process."""
    return Shared()
