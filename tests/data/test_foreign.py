"""Caches of other tools become ours: same targets as our own capture, kept on the side of the norm they were stored on."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.data.capture import recheck
from dspark.data.features import FeatureCache, FeatureWriter, Manifest
from dspark.data.foreign import foreign_documents, read_speculators, read_vllm, spans_of
from dspark.data.responses import TokenDocument
from dspark.data.synthetic import tiny_documents, tiny_manifest, tiny_verifier
from dspark.verifier import Verifier

AUX = (1, 3)
OPTIONS = {"temperature": 0.0, "domain": "chat", "split_fractions": {"train": 1.0}}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(tied=False)


@pytest.fixture(scope="module")
def tokens(verifier: Verifier) -> list[TokenDocument]:
    return tiny_documents(verifier, counts={"train": 5})


def raw_states(verifier: Verifier, document: TokenDocument) -> Tensor:
    """[S, L + 1, H] as vLLM stores them: residual streams after 1, 3 and all 4 layers, none of them normed."""
    outputs: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda _m, _i, o, i=i: outputs.update({i + 1: o if isinstance(o, Tensor) else o[0]})
        )
        for i, layer in enumerate(verifier.decoder.layers)
    ]
    with torch.inference_mode():
        verifier.decoder(torch.tensor(document.input_ids)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([outputs[i][0] for i in (1, 3, 4)], dim=1).bfloat16()


def speculators_folder(path: Path, verifier: Verifier, tokens: list[TokenDocument]) -> Path:
    (path / "hidden_states").mkdir(parents=True)
    table = pa.table(
        {
            "input_ids": [list(t.input_ids) for t in tokens],
            "loss_mask": [[int(m) for m in t.loss_mask] for t in tokens],
            "seq_len": [len(t.input_ids) for t in tokens],
        }
    )
    with (
        pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    for row, document in enumerate(tokens):
        tensors = {
            "hidden_states": raw_states(verifier, document),
            "token_ids": torch.tensor(document.input_ids),
        }
        save_file(tensors, path / "hidden_states" / f"hs_{row}.safetensors")
    return path


def convert(path: Path, verifier: Verifier, rows: list) -> FeatureCache:
    manifest = Manifest(
        **{
            **vars(tiny_manifest(verifier, aux_layer_ids=AUX)),
            "last": "pre_norm",
            "capture": {"foreign": True},
        }
    )
    weights = {"norm.weight": verifier.final_norm_weight(), "lm_head.weight": verifier.head_weight()}
    with FeatureWriter(path, manifest, shard_bytes=10**6) as writer:
        writer.write_verifier(verifier)
        for document in foreign_documents(rows, weights=weights, manifest=manifest):
            writer.add(document)
    return FeatureCache.open(path)


def test_a_speculators_folder_gives_the_targets_our_own_capture_gives(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    rows, skipped = read_speculators(speculators_folder(tmp_path / "s", verifier, tokens), **OPTIONS)
    assert not skipped
    cache = convert(tmp_path / "c", verifier, rows)
    assert cache.manifest.last == "pre_norm"
    assert len(cache) == len(tokens)
    by_ids = {tuple(d.input_ids.tolist()): d for d in cache}
    for token in tokens:
        document = by_ids[token.input_ids]
        own = verifier.capture(torch.tensor(token.input_ids)[None], aux_layer_ids=AUX)
        assert torch.equal(document.aux, own.aux[0])
        torch.testing.assert_close(document.lse, own.lse[0], atol=0.05, rtol=0.01)
        assert document.loss_mask.tolist() == token.loss_mask
        normed = verifier.decoder.norm(document.last.float())
        torch.testing.assert_close(normed.bfloat16(), own.last[0], atol=0.05, rtol=0.02)
    assert recheck(verifier, list(cache), aux_layer_ids=AUX, last="pre_norm").problem("float32") is None


def test_the_same_states_called_post_norm_do_not_open(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    rows, _ = read_speculators(speculators_folder(tmp_path / "s", verifier, tokens), **OPTIONS)
    convert(tmp_path / "c", verifier, rows)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    (tmp_path / "c" / "manifest.json").write_text(json.dumps({**manifest, "last": "post_norm"}))
    with pytest.raises(ValueError, match="other side of the final norm"):
        FeatureCache.open(tmp_path / "c")


def test_rows_without_states_or_answers_are_counted(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    blank = TokenDocument(**{**vars(tokens[0]), "spans": ()})
    folder = speculators_folder(tmp_path, verifier, [*tokens[:3], blank])
    (folder / "hidden_states" / "hs_1.safetensors").unlink()
    rows, skipped = read_speculators(folder, **OPTIONS)
    assert len(rows) == 2
    assert skipped == {"no_states": 1, "unsupervised": 1}
    with pytest.raises(ValueError, match=r"state\.json is missing"):
        read_speculators(tmp_path / "hidden_states", **OPTIONS)


def test_states_of_other_tokens_or_layers_are_refused(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    folder = speculators_folder(tmp_path / "s", verifier, tokens[:2])
    rows, _ = read_speculators(folder, **OPTIONS)
    file = folder / "hidden_states" / "hs_0.safetensors"
    states = raw_states(verifier, tokens[0])
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens[0].input_ids) + 1}, file)
    with pytest.raises(ValueError, match=r"hs_0\.safetensors holds states of other tokens"):
        convert(tmp_path / "a", verifier, rows)
    save_file(
        {"hidden_states": states[:, :2].contiguous(), "token_ids": torch.tensor(tokens[0].input_ids)}, file
    )
    with pytest.raises(ValueError, match=r"2 aux layers and the last one need \(\d+, 3, 32\)"):
        convert(tmp_path / "b", verifier, rows)


def test_scaled_eight_bit_states_are_read(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    folder = speculators_folder(tmp_path / "s", verifier, tokens[:1])
    states = raw_states(verifier, tokens[0]).float()
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    tensors = {
        "hidden_states": (states / scales).to(torch.float8_e4m3fn),
        "hidden_states_scales": scales,
        "token_ids": torch.tensor(tokens[0].input_ids),
    }
    save_file(tensors, folder / "hidden_states" / "hs_0.safetensors")
    rows, _ = read_speculators(folder, **OPTIONS)
    document = convert(tmp_path / "c", verifier, rows)[0]
    relative = (document.aux.float() - states[:, :2]).norm() / states[:, :2].norm()
    assert 0 < relative < 0.05


def test_connector_files_need_boundaries_and_respect_locks(
    tmp_path: Path, verifier: Verifier, tokens: list[TokenDocument]
) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    lines = []
    for i, document in enumerate(tokens):
        tensors = {
            "hidden_states": raw_states(verifier, document),
            "token_ids": torch.tensor(document.input_ids),
        }
        save_file(tensors, folder / f"req-{i}.safetensors")
        if i != 3:
            entry = {"file": f"req-{i}.safetensors", "prompt_tokens": document.spans[0][0], "domain": "math"}
            lines.append(json.dumps({**entry, "temperature": 1.0, "split": "test"}))
    with pytest.raises(ValueError, match="do not say where the answer starts"):
        read_vllm(folder, boundaries=None, **OPTIONS)
    boundaries = tmp_path / "boundaries.jsonl"
    boundaries.write_text("\n".join(lines))
    (folder / "req-1.safetensors").write_bytes(b"cut short")
    with (folder / "req-4.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows, skipped = read_vllm(folder, boundaries=boundaries, **OPTIONS)
    assert skipped == {"no_boundary": 1, "unreadable": 1, "being_written": 1}
    cache = convert(tmp_path / "c", verifier, rows)
    assert len(cache) == 2
    info = cache.info(0)
    assert (info.domain, info.split, info.temperature) == ("math", "test", 1.0)
    boundaries.write_text('{"file": "req-0.safetensors"}')
    with pytest.raises(ValueError, match="line 1: expected the keys file and prompt_tokens"):
        read_vllm(folder, boundaries=boundaries, **OPTIONS)


def test_spans_are_runs_of_ones() -> None:
    assert spans_of([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)]
    assert spans_of([1, 1]) == [(0, 2)]
    assert spans_of([]) == []
