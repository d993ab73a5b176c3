"""Features in a GPU's memory, loaded or captured there, against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.data.batches import PackedRows
from dspark.data.capture import capture_batch
from dspark.data.features import Features
from dspark.data.online import OnlineFeatures
from dspark.data.synthetic import synthetic_cache, tiny_documents, tiny_manifest, tiny_verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def resident_rows(features: Features, device: str) -> PackedRows:
    rows = PackedRows(
        features, features.select(split="train"), seq_length=128, anchors=16, seed=0, dtype=torch.bfloat16
    )
    rows.make_resident(device, features.select(split="validation"))
    return rows


def test_rows_of_a_cache_are_the_same_bits(tmp_path):
    cache = synthetic_cache(tmp_path)
    here, there = resident_rows(cache, "cpu"), resident_rows(cache, "cuda")
    indices = list(range(2 * here.rows_per_epoch))
    for start in range(0, len(indices), 4):
        (a,), (b,) = (
            here.__getitems__(indices[start : start + 4]),
            there.__getitems__(indices[start : start + 4]),
        )
        for name, tensor in vars(a).items():
            assert getattr(b, name).device.type == "cuda"
            assert torch.equal(getattr(b, name).cpu(), tensor), name


@pytest.mark.parametrize("resident", [True, False])
def test_captured_rows_are_those_of_the_cpu_up_to_rounding(resident):
    on_cpu, verifier = tiny_verifier(), tiny_verifier()
    documents = tiny_documents(on_cpu, counts={"train": 12, "validation": 3})
    verifier.model.to("cuda")
    manifest = tiny_manifest(on_cpu)
    expected = resident_rows(
        OnlineFeatures(Path("set"), manifest, on_cpu, documents, tokens_per_batch=300), "cpu"
    )
    features = OnlineFeatures(Path("set"), manifest, verifier, documents, tokens_per_batch=300)
    rows = PackedRows(
        features, features.select(split="train"), seq_length=128, anchors=16, seed=0, dtype=torch.bfloat16
    )
    if resident:
        rows.make_resident("cuda", features.select(split="validation"))
        assert verifier.device.type == "cpu", "the verifier stays in device memory"
    for index in range(rows.rows_per_epoch):
        a, b = expected[index], rows[index]
        assert b.aux.device.type == "cuda"
        for name in ("input_ids", "positions", "doc_start", "loss_mask", "anchors", "anchor_valid"):
            assert torch.equal(getattr(b, name).cpu(), getattr(a, name)), name
        for name in ("aux", "last", "lse"):
            torch.testing.assert_close(
                getattr(b, name).cpu().float(), getattr(a, name).float(), rtol=2**-6, atol=2**-6
            )
    held = features.select(split="validation")[0]
    assert features[held].last.device.type == "cpu"
    assert features[features.select(split="train")[0]].last.isfinite().all(), "read after the release"


def test_states_reach_host_memory_whole():
    verifier = tiny_verifier()
    documents = tiny_documents(verifier, counts={"train": 6})
    expected = capture_batch(verifier, documents, aux_layer_ids=(1, 3))
    verifier.model.to("cuda")
    for a, b in zip(expected, capture_batch(verifier, documents, aux_layer_ids=(1, 3)), strict=True):
        assert b.aux.is_pinned()
        assert a.info == b.info
        torch.testing.assert_close(a.aux.float(), b.aux.float(), rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(a.lse, b.lse, rtol=1e-3, atol=1e-3)
