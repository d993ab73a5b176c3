"""Packed rows and their anchors against a plain reference, from a cache and from device memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.data.batches import PackedRows, ResidentFeatures, row_layout
from dspark.data.features import FeatureCache
from dspark.data.synthetic import synthetic_cache

SEED = 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("rows") / "cache")


def rows_of(cache: FeatureCache, seq_length: int, anchors: int) -> PackedRows:
    return PackedRows(
        cache,
        cache.select(split="train"),
        seq_length=seq_length,
        anchors=anchors,
        seed=SEED,
        dtype=torch.bfloat16,
    )


def plain_row(cache: FeatureCache, numbers: list[int], seq_length: int) -> dict[str, list]:
    """Token by token; what follows the last document is padding."""
    row: dict[str, list] = {"input_ids": [], "positions": [], "doc_start": [], "loss_mask": [], "lse": []}
    for number in numbers:
        document, start = cache[number], len(row["input_ids"])
        for position in range(document.info.tokens):
            if len(row["input_ids"]) < seq_length:
                row["input_ids"].append(int(document.input_ids[position]))
                row["positions"].append(position)
                row["doc_start"].append(start)
                row["loss_mask"].append(bool(document.loss_mask[position]))
                row["lse"].append(float(document.lse[position]))
    for place in range(len(row["input_ids"]), seq_length):
        for name, value in zip(row, (0, 0, place, False, 0.0), strict=True):
            row[name].append(value)
    return row


def plain_anchors(row: dict[str, list], count: int, *key: int) -> tuple[list[int], list[bool]]:
    """`count` of the places whose next token is supervised and theirs, drawn by a key, ascending; the last one repeated."""
    start, length = row["doc_start"], len(row["input_ids"])
    places = [
        i for i in range(length - 1) if row["loss_mask"][i + 1] and start[i] == start[i + 1] and i > start[i]
    ]
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
    if len(places) > count:
        chosen = torch.randperm(len(places), generator=generator)[:count].tolist()
        return [places[i] for i in sorted(chosen)], [True] * count
    missing = count - len(places)
    return places + [places[-1] if places else 0] * missing, [True] * len(places) + [False] * missing


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("seq_length", "anchors"), [(128, 16), (128, 200), (30, 8), (1024, 64)])
def test_rows_and_anchors_are_those_of_a_plain_loop(cache, resident, seq_length, anchors):
    rows = rows_of(cache, seq_length, anchors)
    if resident:
        rows.make_resident("cpu")
    assert rows.cropped > 0 or seq_length > 30
    for index in range(2 * rows.rows_per_epoch):
        epoch, place = divmod(index, rows.rows_per_epoch)
        expected = plain_row(cache, rows.rows(epoch)[place], seq_length)
        batch = rows[index]
        for name, values in expected.items():
            assert getattr(batch, name)[0].tolist() == pytest.approx(values), (index, name)
        wanted, valid = plain_anchors(expected, anchors, SEED, epoch, place)
        assert batch.anchors[0].tolist() == wanted, index
        assert batch.anchor_valid[0].tolist() == valid, index


@pytest.mark.parametrize("resident", [True, False])
def test_a_batch_is_its_rows_stacked_also_over_the_end_of_an_epoch(cache, resident):
    rows = rows_of(cache, 128, 16)
    if resident:
        rows.make_resident("cpu")
    indices = list(range(rows.rows_per_epoch - 2, rows.rows_per_epoch + 2))
    single = [rows[i] for i in indices]
    together = rows.__getitems__(indices)
    assert len(together) == (1 if resident else 4)
    for name in vars(single[0]):
        whole = torch.cat([getattr(batch, name) for batch in together])
        assert torch.equal(whole, torch.cat([getattr(batch, name) for batch in single])), name
        assert whole.is_contiguous()


def test_features_lie_in_portions_of_any_size(cache, monkeypatch):
    documents = cache.select(split="train")
    whole = ResidentFeatures(cache, documents, "cpu")
    monkeypatch.setattr("dspark.data.features.PORTION_BYTES", 9_000)
    seen: list[int] = []
    portioned = ResidentFeatures(cache, documents, "cpu", seen.append)
    assert len(seen) > 6
    assert sum(seen) == sum(cache.info(d).tokens for d in documents)
    assert portioned.places == whole.places
    for name in ("aux", "last", "lse"):
        assert torch.equal(getattr(portioned, name), getattr(whole, name)), name
        first, tokens = portioned.places[documents[3]]
        stored = getattr(portioned, name)[first : first + tokens]
        assert torch.equal(stored, getattr(cache[documents[3]], name))


def test_taps_reach_resident_features(cache):
    documents = cache.select(split="train")
    narrow = ResidentFeatures(cache.with_taps([1, 3]), documents, "cpu")
    whole = ResidentFeatures(cache, documents, "cpu")
    assert torch.equal(narrow.aux, whole.aux[:, [0, 2]])


def test_a_row_without_documents_is_padding_alone():
    positions, doc_start = row_layout([], 5)
    assert positions.tolist() == [0] * 5
    assert doc_start.tolist() == [0, 1, 2, 3, 4]


def test_resident_documents_with_bad_features_leave_rows_without_them(cache, monkeypatch):
    rows = rows_of(cache, 128, 16)
    sound, bad = rows[0], rows.rows(0)[0][0]
    packed = FeatureCache.packed

    def damaged(self, documents, device):
        for part in packed(self, documents, device):
            at = sum(self.info(d).tokens for d in part.documents[: part.documents.index(bad)])
            part.last[at + 1, 0] = float("nan")
            yield part

    monkeypatch.setattr(FeatureCache, "packed", damaged)
    rows.make_resident("cpu")
    assert rows.bad_documents == 1
    batch = rows[0]
    assert batch.last.isfinite().all()
    assert int(batch.loss_mask.sum()) == int(sound.loss_mask.sum()) - cache.info(bad).response_tokens
