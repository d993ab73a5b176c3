"""The feature cache: what is written is what is read, damage is named, and a killed writer continues."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.data.capture import capture_documents
from dspark.data.features import (
    MANIFEST,
    UNFINISHED,
    Document,
    FeatureCache,
    FeatureWriter,
    document_bytes,
    document_id,
)
from dspark.data.synthetic import synthetic_cache, tiny_documents, tiny_manifest, tiny_verifier
from dspark.verifier import Verifier

COUNTS = {"train": 10, "validation": 4, "test": 4}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier()


@pytest.fixture(scope="module")
def documents(verifier: Verifier) -> list[Document]:
    tokens = tiny_documents(verifier, counts=COUNTS)
    return list(capture_documents(verifier, tokens, aux_layer_ids=(1, 2, 3), tokens_per_batch=512, seed=0))


def write(path: Path, verifier: Verifier, documents: list[Document], **options: object) -> FeatureWriter:
    writer = FeatureWriter(path, tiny_manifest(verifier), **{"shard_bytes": 16_000, **options})
    writer.write_verifier(verifier)
    for document in documents:
        if document.info.doc_id not in writer and not writer.add(document):
            break
    return writer


def test_every_document_comes_back_bit_equal(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    manifest = write(tmp_path, verifier, documents).close()
    cache = FeatureCache.open(tmp_path)
    assert len(cache) == len(documents) == manifest.documents
    assert len(manifest.shards) > 1
    stored = {d.info.doc_id: d for d in cache}
    for document in documents:
        again = stored[document.info.doc_id]
        assert again.info == document.info
        for name in ("input_ids", "loss_mask", "aux", "last", "lse"):
            assert torch.equal(getattr(again, name), getattr(document, name)), name
        assert (again.aux.dtype, again.last.dtype, again.lse.dtype) == (
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
        )
    assert manifest.tokens == sum(d.info.tokens for d in documents)
    assert manifest.supervised_tokens == sum(int(d.loss_mask.sum()) for d in documents)
    assert manifest.splits == COUNTS


def test_probabilities_from_last_and_lse_sum_to_one(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents).close()
    cache = FeatureCache.open(tmp_path)
    head = cache.verifier_weights()["lm_head.weight"].float()
    document = cache[0]
    p = (document.last.float() @ head.T - document.lse[:, None]).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(document.info.tokens), atol=1e-4, rtol=0)


def test_estimate_is_within_five_percent(tmp_path: Path, verifier: Verifier) -> None:
    wide = tiny_verifier(hidden_size=128)
    tokens = tiny_documents(wide, counts={"train": 12}, max_new_tokens=80)
    manifest = tiny_manifest(wide)
    with FeatureWriter(tmp_path, manifest, shard_bytes=10**6) as writer:
        writer.write_verifier(wide)
        for document in capture_documents(
            wide, tokens, aux_layer_ids=(1, 2, 3), tokens_per_batch=512, seed=0
        ):
            writer.add(document)
    expected = sum(document_bytes(len(t.input_ids), num_aux_layers=3, hidden_size=128) for t in tokens)
    found = sum(s.bytes for s in writer.manifest.shards)
    assert abs(expected / found - 1) < 0.05


def test_select_filters_by_split_domain_and_temperature(tmp_path: Path) -> None:
    cache = synthetic_cache(tmp_path)
    assert len(cache) == 28
    every = [cache.select(split=s) for s in ("train", "validation", "test")]
    assert sorted(i for part in every for i in part) == list(range(28))
    for temperature in (0.0, 1.0):
        picked = cache.select(split="test", temperature=temperature, domain="math")
        assert all(
            cache.info(i).temperature == temperature and cache.info(i).domain == "math" for i in picked
        )
    assert cache.select(temperature=0.0)
    assert cache.select(temperature=1.0)
    ids, mask = cache.tokens(3)
    assert torch.equal(ids, cache[3].input_ids)
    assert torch.equal(mask, cache[3].loss_mask)


def test_a_cache_survives_pickling_for_loader_workers(tmp_path: Path) -> None:
    cache = synthetic_cache(tmp_path)
    before = cache[0].last
    assert torch.equal(pickle.loads(pickle.dumps(cache))[0].last, before)


@pytest.mark.parametrize("verify", ["hash", "sizes"])
def test_a_truncated_shard_is_named(tmp_path: Path, verify: str) -> None:
    synthetic_cache(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"shard-00001\.safetensors has \d+ bytes, its manifest says \d+; delete that file"
    ):
        FeatureCache.open(tmp_path, verify=verify)


def test_a_flipped_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    synthetic_cache(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-7] ^= 0xFF
    shard.write_bytes(bytes(data))
    with pytest.raises(
        ValueError, match=r"shard-00001\.safetensors is damaged: sha256 .* delete that file and run"
    ):
        FeatureCache.open(tmp_path)


def test_a_damaged_shard_stops_a_resumed_writer_until_it_is_deleted_then_only_it_is_rewritten(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents).close()
    shard = tmp_path / "shard-00001.safetensors"
    untouched = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    data = bytearray(shard.read_bytes())
    data[-7] ^= 0xFF
    shard.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged"):
        write(tmp_path, verifier, documents)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        FeatureCache.open(tmp_path)
    write(tmp_path, verifier, documents).close()
    assert len(FeatureCache.open(tmp_path)) == len(documents)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == untouched


def test_a_missing_or_unfinished_cache_says_what_to_do(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    with pytest.raises(ValueError, match=r"holds no cache; `python -m experiments.collect`"):
        FeatureCache.open(tmp_path)
    write(tmp_path, verifier, documents[:3]).flush()
    with pytest.raises(ValueError, match="unfinished cache; run the same collect command again"):
        FeatureCache.open(tmp_path)


def test_a_killed_writer_keeps_whole_shards_and_ignores_the_half_written_one(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    first = write(tmp_path, verifier, documents[:4], shard_bytes=10**6)
    first.flush()
    for document in documents[4:7]:
        first.add(document)  # pending when the writer dies
    (tmp_path / "shard-00077.safetensors.tmp").write_bytes(b"half of a shard")
    second = write(tmp_path, verifier, documents)
    assert second.resumed == 4
    second.close()
    assert not list(tmp_path.glob("*.tmp"))
    assert not (tmp_path / UNFINISHED).exists()
    cache = FeatureCache.open(tmp_path)
    assert sorted(cache.info(i).doc_id for i in range(len(cache))) == sorted(d.info.doc_id for d in documents)


def test_a_shard_that_cannot_be_written_stops_the_writer(
    tmp_path: Path, verifier: Verifier, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: Path, documents: list[Document]) -> None:
        raise OSError(f"no space left for {target.name}")

    with monkeypatch.context() as patch:
        patch.setattr("dspark.data.features._write_shard", full)
        with pytest.raises(OSError, match=r"no space left for shard-00000"):
            write(tmp_path, verifier, documents).close()
    assert not (tmp_path / MANIFEST).exists()
    writer = write(tmp_path, verifier, documents)
    assert writer.resumed == 0
    assert writer.close().documents == len(documents)


def test_tensors_in_a_shard_are_aligned_and_named_by_kind(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents, shard_bytes=10**7).close()
    raw = (tmp_path / "shard-00000.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    assert len(header) == 1 + 5 * len(documents)
    widths = {"F32": 4, "I32": 4, "BF16": 2, "BOOL": 1}
    places = sorted((t["data_offsets"], t["dtype"]) for n, t in header.items() if n != "__metadata__")
    assert all(start % widths[dtype] == 0 for (start, _), dtype in places)
    assert [0, *(end for (_, end), _ in places)] == [
        *(start for (start, _), _ in places),
        len(raw) - 8 - size,
    ]


def test_resume_with_another_order_and_limit_writes_each_document_once(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents[:5]).close()
    writer = write(tmp_path, verifier, list(reversed(documents)))
    assert writer.resumed == 5
    assert writer.close().documents == len(documents)
    assert len(FeatureCache.open(tmp_path)) == len(documents)


def test_another_verifier_layer_set_or_dataset_cannot_share_a_folder(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents).close()
    other = tiny_verifier(seed=1)
    with pytest.raises(
        ValueError,
        match=rf"verifier.weights_sha: '{other.info.weights_sha}' now, '{verifier.info.weights_sha}' there",
    ):
        FeatureWriter(tmp_path, tiny_manifest(other), shard_bytes=10**6)
    with pytest.raises(ValueError, match=r"aux_layer_ids: \[1, 2\] now, \[1, 2, 3\] there"):
        FeatureWriter(tmp_path, tiny_manifest(verifier, aux_layer_ids=(1, 2)), shard_bytes=10**6)
    with pytest.raises(ValueError, match="dataset: 'other' now, 'synthetic' there"):
        FeatureWriter(tmp_path, replace(tiny_manifest(verifier), dataset="other"), shard_bytes=10**6)
    moved = replace(
        tiny_manifest(verifier), verifier=replace(verifier.info, path="elsewhere", name="renamed")
    )
    FeatureWriter(tmp_path, moved, shard_bytes=10**6)


def test_contract_names_both_values_for_a_cache_of_another_verifier(tmp_path: Path) -> None:
    ours = synthetic_cache(tmp_path / "a").contract()
    theirs = synthetic_cache(tmp_path / "b", verifier=tiny_verifier(seed=3)).contract()
    with pytest.raises(
        ValueError, match=rf"verifier_sha: '{ours.verifier_sha}' in run, '{theirs.verifier_sha}' in cache"
    ):
        ours.check(theirs, mine="run", theirs="cache")


def test_documents_with_nan_are_skipped_counted_and_bounded(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    last = documents[0].last.clone()
    last[2, 3] = float("nan")
    spoilt = [replace(documents[0], last=last), *documents[1:]]
    manifest = write(tmp_path / "a", verifier, spoilt, max_bad_fraction=0.2).close()
    assert manifest.skipped == {"not_finite": 1}
    assert manifest.documents == len(documents) - 1
    with pytest.raises(
        ValueError, match=r"1 of 18 documents had NaN or infinite hidden states, more than .* 0\.01"
    ):
        write(tmp_path / "b", verifier, spoilt).close()
    assert not (tmp_path / "b" / MANIFEST).exists()


def test_a_byte_budget_stops_cleanly_and_a_larger_one_continues(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    budget = 80_000
    manifest = write(tmp_path, verifier, documents, byte_budget=budget).close()
    assert manifest.stopped == "byte_budget"
    assert 0 < manifest.documents < len(documents)
    assert manifest.bytes <= budget
    assert len(FeatureCache.open(tmp_path)) == manifest.documents
    assert write(tmp_path, verifier, documents).close().stopped == "complete"
    assert len(FeatureCache.open(tmp_path)) == len(documents)


def test_one_prompt_cannot_be_in_two_splits(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    train = next(d for d in documents if d.info.split == "train")
    twin = replace(train, info=replace(train.info, split="test", doc_id="other"))
    with pytest.raises(ValueError, match=r"is in the splits 'train' and 'test'"):
        write(tmp_path, verifier, [train, twin])


def test_wrong_shapes_and_mask_tokens_in_text_are_refused(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    with pytest.raises(ValueError, match=r"last has shape \(\d+, 32\)"):
        write(tmp_path / "a", verifier, [replace(documents[0], last=documents[0].last[:-1])])
    ids = documents[0].input_ids.clone()
    ids[1] = 6
    with pytest.raises(ValueError, match="contains the mask token 6"):
        write(tmp_path / "b", verifier, [replace(documents[0], input_ids=ids)])


def test_states_behind_the_other_side_of_the_norm_are_refused_at_open(
    tmp_path: Path, verifier: Verifier, documents: list[Document]
) -> None:
    write(tmp_path, verifier, documents).close()
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["last"] = "pre_norm"
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="other side of the final norm"):
        FeatureCache.open(tmp_path)


def test_a_manifest_of_another_format_or_with_nonsense_is_refused(tmp_path: Path) -> None:
    synthetic_cache(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99, this release reads 1"):
        FeatureCache.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{not json")
    with pytest.raises(ValueError, match="is not a cache manifest"):
        FeatureCache.open(tmp_path)


def test_the_manifest_pins_what_a_cache_depends_on(tmp_path: Path, verifier: Verifier) -> None:
    manifest = synthetic_cache(tmp_path, verifier=verifier).manifest
    assert manifest.verifier == verifier.info
    assert manifest.verifier.chat_template_sha
    assert manifest.verifier.tokenizer_sha
    assert manifest.aux_convention == "residual_after_i_layers"
    assert (manifest.last, manifest.responses_by) == ("post_norm", verifier.info.name)
    assert len(manifest.prompts_sha) == 64
    assert manifest.capture["use_cache"] is False
    assert manifest.producer.startswith("dspark ")


def test_content_ids_depend_on_tokens_mask_and_temperature() -> None:
    base = document_id([5, 6, 7], [False, True, True], temperature=0.0)
    assert base == document_id(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 1]), temperature=0.0)
    others = {
        document_id([5, 6, 8], [False, True, True], temperature=0.0),
        document_id([5, 6, 7], [False, False, True], temperature=0.0),
        document_id([5, 6, 7], [False, True, True], temperature=1.0),
    }
    assert len(others) == 3
    assert base not in others


def test_a_synthetic_cache_is_deterministic(tmp_path: Path) -> None:
    a, b = synthetic_cache(tmp_path / "a"), synthetic_cache(tmp_path / "b")
    assert [s.sha256 for s in a.manifest.shards] == [s.sha256 for s in b.manifest.shards]
