"""The packed draft: how far its weights are from the originals, what is refused, and how it opens by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dspark import pretrained
from dspark.config import DraftConfig
from dspark.nn.draft import Draft
from dspark.pretrained import dequantise, expand, pack, quantise, read_packed, squeeze, unpack, without_paths
from dspark.runs import Run, RunManifest, load_draft, save_draft
from dspark.vocab import VocabMap
from experiments.evaluate import open_runs
from experiments.train import WarmStart
from tests.builders import random_draft

ORIGIN = {"verifier_name": "tiny"}


@pytest.fixture
def head() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(97, 32, generator=generator).to(torch.bfloat16)


@pytest.fixture
def run(tmp_path: Path, head: torch.Tensor) -> Run:
    """A run of a random draft, trained somewhere else."""
    draft = random_draft()
    draft.set_frozen(head, head, VocabMap(draft.kept_ids, 97), torch.float32)
    manifest = RunManifest(
        run_id="20260101-000000-tiny-s0",
        command="python -m experiments.train seed=0 data.cache=/mnt/disk/cache label=tiny",
        overrides=["seed=0", "data.cache=/mnt/disk/cache", "label=tiny"],
        config_sha="0",
        seed=0,
        verifier={"name": "tiny"},
        data={"cache": "/mnt/disk/cache", "documents": 3},
        parent=None,
        status="complete",
    )
    run = Run.create(tmp_path / "elsewhere", manifest, "seed: 0\ndata:\n  cache: /mnt/disk/cache\n")
    save_draft(draft, run.checkpoints / "best", draft.contract, {"step": 7})
    return run


@pytest.fixture
def stem(run: Run, tmp_path: Path) -> Path:
    pack(run.path, tmp_path / "packed", origin=ORIGIN, measured={"tau": 1.5})
    return tmp_path / "packed"


# ---- few bits


def test_every_value_is_within_half_a_step_of_its_line() -> None:
    torch.manual_seed(0)
    lines = torch.randn(6, 200) * torch.tensor([1.0, 10.0, 0.01, 3.0, 1.0, 1.0]).unsqueeze(1)
    lines[3, 7] = 500.0  # fourteen root mean squares: more steps of 0.1 than a byte counts
    lines[4] = 0.0
    codes, scales = quantise(lines, step=0.1)
    assert codes.abs().max() > 127
    error = (dequantise(codes, scales) - lines).abs().amax(1)
    rms = lines.square().mean(1).sqrt()
    assert bool((error <= 0.1 * rms / 2 * (1 + 2**-10)).all())  # scales are fp16
    assert scales[4] == 0
    # Not better than such steps can be, either: their error is uniform, a twelfth of the square.
    ordinary = (dequantise(codes, scales) - lines)[:2].square().mean(1) / (0.1 * rms[:2]).square()
    torch.testing.assert_close(ordinary, torch.full((2,), 1 / 12), rtol=0.25, atol=0)


def test_codes_survive_squeezing_and_take_little_more_than_their_entropy() -> None:
    torch.manual_seed(0)
    codes, _ = quantise(torch.randn(64, 512), step=0.11)
    stream, wide = squeeze(codes)
    assert torch.equal(expand(stream, wide, rows=64), codes)
    assert not len(wide)
    share = torch.bincount(codes.flatten().long() + 127).double()
    share = share[share > 0] / codes.numel()
    entropy = float(-(share * share.log2()).sum())
    assert entropy <= stream.numel() * 8 / codes.numel() <= entropy + 0.15
    assert entropy < 5.5


def test_a_value_beyond_all_codes_is_refused() -> None:
    lines = torch.zeros(1, 4000)
    lines[0, 0] = 1.0
    with pytest.raises(ValueError, match=r"more than 32767 steps of 0\.001 root mean squares.*wider"):
        quantise(lines, step=0.001)


def test_matrices_are_told_apart_by_where_they_are() -> None:
    assert pretrained.step_of("layers.3.mlp.gate_proj.weight") == pretrained.STEPS["mlp.gate_proj"]
    assert pretrained.step_of("fc.weight") == pretrained.STEPS["fc"]
    assert pretrained.step_of("markov_head.gate_proj.weight") == pretrained.STEP  # of a gated head


def test_codes_that_no_byte_holds_survive_squeezing() -> None:
    codes = torch.tensor([[0, 127, 128, -127, -128, -129], [32767, -32767, 1, -1, 500, 0]], dtype=torch.int16)
    stream, wide = squeeze(codes)
    assert wide.tolist() == [128, -128, -129, 32767, -32767, 500]
    assert torch.equal(expand(stream, wide, rows=2), codes)


# ---- pack and unpack


def test_a_run_comes_back_with_weights_near_the_original_and_its_own_vocabulary(
    run: Run, stem: Path, head: torch.Tensor, tmp_path: Path
) -> None:
    unpack(stem, tmp_path / "runs" / "again", head)
    again = Run.open(tmp_path / "runs" / "again")
    before, contract, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    after, found, facts = load_draft(again.checkpoint("best"), attention_backend="grouped")
    assert after.config == before.config
    assert found == contract
    assert torch.equal(after.kept_ids, before.kept_ids)
    assert torch.equal(after.lm_head.float(), before.lm_head)
    assert facts == {"step": 7, "origin": ORIGIN}
    originals = dict(before.named_parameters())
    for name, weight in after.named_parameters():
        original = originals[name].detach()
        error = (weight.detach() - original).abs()
        share = pretrained.step_of(name)
        if name.startswith("markov_head."):
            step = share * original.square().mean(0).sqrt()
        elif original.ndim == 2 and len(original) > 1:
            step = (share * original.square().mean(1).sqrt()).unsqueeze(1)
        else:
            step = original.abs() / 1024  # fp16
        assert bool((error <= 0.51 * step + 1e-7).all()), name
    assert any(not torch.equal(w, originals[n]) for n, w in after.named_parameters())
    last, _, _ = load_draft(again.checkpoint("last"), attention_backend="grouped")
    assert torch.equal(last.fc.weight, after.fc.weight)


def test_the_manifest_keeps_what_was_run_and_drops_paths_of_the_machine(
    stem: Path, head: torch.Tensor, tmp_path: Path
) -> None:
    unpack(stem, tmp_path / "again", head)
    manifest = Run.open(tmp_path / "again").manifest
    assert manifest.command == "python -m experiments.train seed=0 label=tiny"
    assert manifest.overrides == ["seed=0", "label=tiny"]
    assert manifest.data == {"cache": "data/cache/smollm2", "documents": 3}
    assert (manifest.run_id, manifest.status) == ("20260101-000000-tiny-s0", "complete")
    assert OmegaConf.load(tmp_path / "again" / "config.yaml") == {"seed": 0, "data": {"cache": None}}
    assert "/mnt" not in stem.with_suffix(".json").read_text()


def test_packing_again_gives_the_same_bytes_and_the_size_it_says(
    run: Run, stem: Path, tmp_path: Path
) -> None:
    size = pack(run.path, tmp_path / "twice", origin=ORIGIN, measured={"tau": 1.5})
    files = [p.with_suffix(s) for p in (tmp_path / "twice", stem) for s in (".safetensors", ".json")]
    assert files[0].read_bytes() == files[2].read_bytes()
    assert files[1].read_bytes() == files[3].read_bytes()
    assert size == sum(f.stat().st_size for f in files[:2])


@pytest.mark.parametrize("words", [["a=/x"], ["a=[/x,/y]"], ["a='/x'"], ["/x"], ["a=~/x"]])
def test_absolute_paths_are_left_out(words: list[str]) -> None:
    assert without_paths([*words, "b=c/d", "e=1"]) == ["b=c/d", "e=1"]


def test_weights_beyond_fp16_are_refused(run: Run, tmp_path: Path) -> None:
    draft, contract, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    with torch.no_grad():
        draft.norm.weight[0] = 1e6
    save_draft(draft, run.checkpoints / "best", contract, {})
    with pytest.raises(ValueError, match=r"norm\.weight .* fp16 cannot hold"):
        pack(run.path, tmp_path / "big", origin=ORIGIN, measured={})


def test_damaged_and_missing_files_are_refused(stem: Path, head: torch.Tensor, tmp_path: Path) -> None:
    data = stem.with_suffix(".safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"packed\.safetensors is damaged: sha256 .* install the package again"
    ):
        unpack(stem, tmp_path / "again", head)
    data.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(stem, tmp_path / "again", head)
    described = json.loads(stem.with_suffix(".json").read_text())
    stem.with_suffix(".json").write_text(json.dumps({**described, "format": "dspark-packed-9"}))
    data.write_bytes(content)
    with pytest.raises(ValueError, match=r"format 'dspark-packed-9'; this version reads 'dspark-packed-2'"):
        unpack(stem, tmp_path / "again", head)
    assert not (tmp_path / "again").exists()


def test_another_verifiers_head_is_refused(stem: Path, head: torch.Tensor, tmp_path: Path) -> None:
    kept = read_packed(stem)[1]["kept_ids"]
    other = head.clone()
    other[kept[3], 0] += 1
    for foreign in (other, head[:96], head[:, :16]):
        with pytest.raises(ValueError, match=r"belongs to verifier 'tiny'.* are not that verifier's"):
            unpack(stem, tmp_path / "folder" / "again", foreign)
    assert not (tmp_path / "folder").exists()
    unused = head.clone()
    unused[next(i for i in range(97) if i not in kept), 0] += 1
    unpack(
        stem, tmp_path / "folder" / "again", unused
    )  # rows that the draft cannot propose are not its matter


# ---- by name


@pytest.fixture
def shop(stem: Path, head: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty working directory and a package that ships `stem`; the list grows with every look at the verifier."""
    looked: list[str] = []
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(pretrained, "STEM", stem)
    monkeypatch.setattr(pretrained, "verifier_rows", lambda: looked.append("verifier") or head)
    return looked


def test_the_name_opens_wherever_a_run_does_and_unpacks_once(shop: list[str]) -> None:
    (run,) = open_runs(OmegaConf.create({"compare": None, "run": "pretrained"}))
    assert run.path == Path("runs/pretrained")
    assert WarmStart.open("pretrained").draft.config == random_draft().config
    assert Run.open("runs/pretrained").manifest.status == "complete"
    assert shop == ["verifier"]
    assert [p.name for p in Path("runs").iterdir()] == ["pretrained"]  # nothing temporary is left


def test_a_folder_of_that_name_is_itself(shop: list[str]) -> None:
    Path("pretrained").mkdir()
    with pytest.raises(FileNotFoundError, match="pretrained is not a run folder"):
        Run.open("pretrained")
    assert shop == []


def test_a_folder_of_another_release_and_a_broken_one_are_refused(shop: list[str]) -> None:
    path = Run.open("pretrained").path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "results": {"packed_sha256": "0"}}))
    with pytest.raises(ValueError, match="not unpacked from this release's draft; move it away"):
        Run.open("pretrained")
    path.unlink()
    with pytest.raises(FileExistsError, match="is no complete run; remove it"):
        Run.open("pretrained")


# ---- the file that ships


def test_the_shipped_draft_is_small_whole_and_smollm2s() -> None:
    sizes = [pretrained.STEM.with_suffix(s).stat().st_size for s in (".safetensors", ".json")]
    assert sum(sizes) <= 12e6
    facts, tensors = read_packed(pretrained.STEM)
    config = DraftConfig.from_dict(facts["draft"]["config"])
    assert (config.num_layers, config.hidden_size, config.block_size) == (5, 576, 8)
    assert (config.draft_vocab_size, config.markov_rank, config.head) == (16384, 64, "vanilla")
    draft = Draft(config, attention_backend="grouped")
    draft.load_state_dict({**tensors, "lm_head": draft.lm_head})  # every name and shape, and no other
    assert all(bool(torch.isfinite(p).all()) and p.abs().max() > 0 for p in draft.parameters())
    found = {
        k: list(v) if isinstance(v, tuple) else v for k, v in asdict(draft.contract).items() if v is not None
    }
    assert found.items() <= facts["draft"]["contract"].items()
    embedded = json.loads((pretrained.STEM.parent / "smollm2.json").read_text())["verifier"]
    assert facts["draft"]["contract"]["verifier_sha"] == embedded["weights_sha"]
    assert facts["draft"]["contract"]["tokenizer_sha"] == embedded["tokenizer_sha"]
    assert RunManifest(**facts["manifest"]).data["cache"] == "data/cache/smollm2"
    measured = facts["measured"]
    assert measured["after"]["tau"] >= 0.98 * measured["before"]["tau"]
