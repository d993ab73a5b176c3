"""The collect command on a tiny verifier: complete, resumable, and clear about what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from dspark.data.features import UNFINISHED, FeatureCache
from dspark.data.responses import TokenSet
from dspark.data.synthetic import tiny_verifier
from experiments import collect
from experiments.cli import CONFIGS

TINY = (
    "verifier=tiny",
    "data=templates",
    "data.counts={train: 6, validation: 3, test: 3}",
    "data.self_counts={train: 0, validation: 0, test: 0}",
    "data.responses.max_new_tokens=8",
    "data.responses.sampled_share=0.5",
    "progress=false",
)


@pytest.fixture(autouse=True)
def in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configuration(*overrides: str, config: str = "collect") -> DictConfig:
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose(config, overrides=list(overrides))


def prompts(path: Path, *turns: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": t}) + "\n" for t in turns))
    return path


def test_a_fresh_folder_holds_every_prompt_afterwards(tmp_path: Path) -> None:
    manifest = collect.collect_cache(configuration(*TINY))
    cache = FeatureCache.open(tmp_path / "data/cache/tiny-templates")
    assert len(cache) == 12 - sum(manifest.skipped.values())
    assert set(manifest.splits) == {"train", "validation", "test"}
    assert set(manifest.domains) == {"math", "code", "chat"}
    assert {cache.info(i).temperature for i in range(len(cache))} == {0.0, 1.0}
    assert manifest.responses_by == "tiny-llama"
    assert manifest.generation["compute_dtype"] == "float32"
    assert manifest.capture["use_cache"] is False


def test_an_estimate_is_close_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect.collect_tokens(configuration(*TINY, "tokens_only=true", "out=set"))
    from_set = ("verifier=tiny", "data=embedded", "data.path=set", "progress=false")
    capsys.readouterr()
    assert collect.collect_cache(configuration(*from_set, "estimate=true")) is None
    said = capsys.readouterr().out
    estimate = int(said.split("estimate: ")[1].split(" bytes")[0])
    assert not (tmp_path / "data").exists()
    manifest = collect.collect_cache(configuration(*from_set))
    assert abs(estimate / manifest.bytes - 1) < 0.05


def test_answers_are_not_generated_twice_and_a_larger_request_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = collect.answer_prompts
    monkeypatch.setattr(collect, "answer_prompts", lambda v, p, **k: asked.append(len(p)) or real(v, p, **k))
    small = configuration(*TINY, "limit=5", "tokens_only=true", "out=set")
    collect.collect_tokens(small)
    assert sum(asked) == 5
    (tmp_path / "set.npz").rename(tmp_path / "set.partial.npz")
    (tmp_path / "set.json").rename(tmp_path / "set.partial.json")
    collect.collect_tokens(configuration(*TINY, "tokens_only=true", "out=set"))
    assert sum(asked) == 12
    assert len(TokenSet.load(tmp_path / "set").documents) >= 10
    assert not list(tmp_path.glob("*.partial.*"))
    (tmp_path / "set.npz").rename(tmp_path / "set.partial.npz")
    (tmp_path / "set.json").rename(tmp_path / "set.partial.json")
    with pytest.raises(ValueError, match=r"under other settings .*'max_new_tokens': \(9, 8\)"):
        collect.collect_tokens(
            configuration(*TINY, "tokens_only=true", "out=set", "data.responses.max_new_tokens=9")
        )


def test_train_and_other_commands_get_the_cache_that_their_groups_name(tmp_path: Path) -> None:
    cfg = configuration(*TINY)
    narrow = OmegaConf.create({"verifier": cfg.verifier, "data": cfg.data})
    cache = collect.ensure_cache(narrow)
    stamp = (cache.path / "manifest.json").stat().st_mtime_ns
    assert len(collect.ensure_cache(narrow)) == len(cache)
    assert (cache.path / "manifest.json").stat().st_mtime_ns == stamp, "a finished cache is only read"
    narrow.verifier.aux_layer_ids = [1, 2]
    with pytest.raises(
        ValueError, match=r"collected with aux_layer_ids=\(1, 2, 3\), verifier\.aux_layer_ids is \(1, 2\)"
    ):
        collect.ensure_cache(narrow)
    narrow.data.cache = "nowhere"
    with pytest.raises(ValueError, match=r"data\.cache=nowhere holds no finished cache"):
        collect.ensure_cache(narrow)


def test_a_set_of_another_verifier_is_refused(tmp_path: Path) -> None:
    collect.collect_tokens(configuration(*TINY, "tokens_only=true", "out=set"))
    cfg = configuration("verifier=tiny", "verifier.seed=1", "data.path=set")
    with pytest.raises(ValueError, match="holds answers of 'tiny-llama'"):
        collect.collect_cache(cfg)
    with pytest.raises(ValueError, match="holds answers of 'smollm2', not of 'tiny-llama'"):
        collect.collect_cache(configuration("verifier=tiny"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "null",
            r"mask_token_id is not set for 'tiny-llama'.*special tokens \[.*6.*\].*beyond the tokenizer \[264, 265",
        ),
        ("2", "is the bos, eos or pad token"),
        ("272", "is outside the 272 embedding rows"),
    ],
)
def test_the_mask_token_must_be_chosen_and_free(value: str, message: str) -> None:
    cfg = configuration(*TINY, f"verifier.mask_token_id={value}")
    with pytest.raises(ValueError, match=message):
        collect.checked_mask_token(cfg, tiny_verifier())


def test_prompt_files_that_hold_nothing_usable_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    jsonl = ("verifier=tiny", "data=jsonl", "data.max_length=64", "progress=false")
    with pytest.raises(ValueError, match=r"prompt file empty\.jsonl is empty"):
        collect.collect_cache(configuration(*jsonl, "data.path=empty.jsonl"))
    prompts(tmp_path / "long.jsonl", ["x" * 100])
    with pytest.raises(ValueError, match="all 1 prompts are longer than max_length=64 tokens"):
        collect.collect_cache(configuration(*jsonl, "data.path=long.jsonl"))
    prompts(tmp_path / "mixed.jsonl", ["x" * 100], *([f"short {i}"] for i in range(6)))
    # The long prompt is a portion of its own: nothing in it can be answered.
    small = ("data.responses.max_new_tokens=6", "data.responses.batch_size=1")
    manifest = collect.collect_cache(configuration(*jsonl, "data.path=mixed.jsonl", *small))
    assert manifest.skipped["too_long"] == 1
    assert manifest.documents + sum(manifest.skipped.values()) == 7


def test_a_byte_budget_leaves_a_readable_cache(tmp_path: Path) -> None:
    manifest = collect.collect_cache(configuration(*TINY, "byte_budget=150KB", "shard_megabytes=0.02"))
    assert manifest.stopped == "byte_budget"
    assert 0 < len(FeatureCache.open(tmp_path / "data/cache/tiny-templates")) < 12
    with pytest.raises(ValueError, match=r"byte_budget is '3 apples'"):
        collect.parse_bytes("3 apples")
    assert collect.parse_bytes("2.5GB") == 2_500_000_000


def test_several_prompt_files_give_one_cache_with_the_domain_of_each(tmp_path: Path) -> None:
    """`limit` is of each file, a prompt of two files counts once, and unknown files have `data.domain`."""
    prompts(tmp_path / "gsm8k.jsonl", *([f"how many {i}"] for i in range(5)))
    prompts(tmp_path / "mbpp.jsonl", ["write f"], ["how many 0"], ["write g"])
    prompts(tmp_path / "mine.jsonl", ["good day"])
    manifest = collect.collect_cache(
        configuration(
            "verifier=tiny",
            "data=jsonl",
            "data.path=[gsm8k.jsonl,mbpp.jsonl,mine.jsonl]",
            "data.responses.max_new_tokens=6",
            "limit=3",
            "name=several",
            "progress=false",
        )
    )
    cache = FeatureCache.open(tmp_path / "data/cache/several")
    domains = Counter(cache.info(i).domain for i in range(len(cache)))
    assert domains == {"math": 3, "code": 2, "chat": 1}
    assert manifest.skipped == {"over_limit": 2, "duplicate": 1}
    assert manifest.dataset == "jsonl:gsm8k.jsonl,mbpp.jsonl,mine.jsonl"


def test_show_mask_counts_and_prints_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    collect.show_mask(configuration(*TINY, "show_mask=2"))
    said = " ".join(capsys.readouterr().out.split())
    assert "<|assistant|>" in said
    assert "0 masks are all zero, 0 all one" in said


def test_killed_with_sigkill_it_resumes_without_losing_or_repeating_a_document(tmp_path: Path) -> None:
    """The real command in its own process, killed in the middle of capturing."""
    prompts(tmp_path / "p.jsonl", *([f"question number {i} of many"] for i in range(60)))
    arguments: list[Any] = [
        sys.executable,
        "-m",
        "experiments.collect",
        "verifier=tiny",
        "data=jsonl",
        "data.path=p.jsonl",
        "data.responses.max_new_tokens=8",
        "data.split_fractions={train: 1.0, validation: 0.0, test: 0.0}",
        "tokens_per_batch=64",
        "shard_megabytes=0.01",
        "name=killed",
    ]
    root = Path(CONFIGS).parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "data/cache/killed"
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.time() + 120
    while (
        len(list(folder.glob("shard-*.safetensors"))) < 2
        and process.poll() is None
        and time.time() < deadline
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, process.stdout.read().decode()[-2000:]
    assert (folder / UNFINISHED).exists()
    with pytest.raises(ValueError, match="unfinished cache"):
        FeatureCache.open(folder)
    before = {f.name: f.stat().st_mtime_ns for f in folder.glob("shard-*.safetensors")}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming: " in done.stdout
    cache = FeatureCache.open(folder)
    prompt_ids = [cache.info(i).prompt_id for i in range(len(cache))]
    assert len(set(prompt_ids)) == len(prompt_ids) == 60 - sum(cache.manifest.skipped.values())
    assert {n: (folder / n).stat().st_mtime_ns for n in before} == before, "finished shards are left alone"


def test_a_callers_mistake_ends_in_one_line_and_status_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(CONFIGS).parent)}
    command = [
        sys.executable,
        "-m",
        "experiments.collect",
        "verifier=tiny",
        "data=jsonl",
        "data.path=none.jsonl",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "error: prompt file none.jsonl does not exist."
    assert "Traceback" not in done.stderr
