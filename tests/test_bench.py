"""The step benchmark itself: what it counts, compares and refuses."""

from __future__ import annotations

import dataclasses
import json

import matplotlib
import pandas as pd
import pytest
import torch

from experiments import bench_step
from experiments.bench_step import (
    GEOMETRIES,
    Ours,
    Settings,
    count_flops,
    main,
    make_problem,
    measure,
    summary,
)

SETTINGS = Settings(
    geometry="tiny",
    device="cpu",
    dtype="fp32",
    peers=(),
    repeats=2,
    warmup=1,
    threads=0,
    seed=0,
    memory=False,
    tolerance=0.01,
    profile=None,
)
KEYS = {
    "peer",
    "version",
    "geometry",
    "device",
    "dtype",
    "phase",
    "ms_median",
    "ms_min",
    "ms_max",
    "peak_gib",
    "tflops",
}


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def rows():
    return measure(SETTINGS, quiet)


def test_rows_hold_the_agreed_keys_and_parts_add_up_to_the_step(rows):
    assert all(set(row) >= KEYS for row in rows)
    times = {row["phase"]: row["ms_max"] for row in rows}
    parts = [phase for phase in times if phase.startswith("part:")]
    assert len(parts) == 6
    assert times["step"] <= sum(times[phase] for phase in parts) + 1e-2
    assert times["step"] >= max(times[phase] for phase in [*parts, "forward", "backward"])
    assert "dspark" in summary(rows)


def test_flops_of_the_tiny_geometry_by_hand():
    problem = make_problem(GEOMETRIES["tiny"], device="cpu", dtype="fp32", seed=0)
    flops = count_flops(problem)
    proposals, slots = 12 * 3, 12 * 4
    assert flops["context"] == 2 * 2 * 160 * 3 * 64 * 64 + 2 * 3 * 2 * 160 * 64 * 64
    assert flops["mlp"] == 3 * 2 * (slots + proposals) * 3 * 64 * 96
    assert flops["vocabulary"] == 2 * proposals * 256 * (2 * (64 + 16) + 16)
    pairs = sum(
        int(a - s) + 4
        for a, s in zip(problem.batch.anchors[0], problem.batch.doc_start[0][problem.batch.anchors[0]])
    )
    assert flops["attention"] == 3 * 4 * 64 * pairs * (4 + 3)


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_geometries_are_valid_drafts(name):
    geometry = GEOMETRIES[name]
    assert geometry.config().num_proposals == geometry.block - (not geometry.sample_from_anchor)
    assert geometry.tokens % geometry.documents == 0


def test_every_slot_of_the_problem_is_supervised():
    problem = make_problem(GEOMETRIES["tiny"], device="cpu", dtype="fp32", seed=3)
    blocks = bench_step.build_blocks(problem.batch, problem.config)
    assert blocks.supervised.all()


def test_a_profile_lists_operators_whose_times_add_up(tmp_path):
    path = tmp_path / "where" / "profile.txt"
    measure(dataclasses.replace(SETTINGS, profile=path), quiet)
    header, whole, *rest = path.read_text().splitlines()
    assert header.split() == ["ms", "a", "step", "calls", "name"]
    spent = [float(line.split()[0]) for line in rest]
    assert spent == sorted(spent, reverse=True)
    assert sum(spent) == pytest.approx(float(whole.split()[0]), abs=0.001 * len(spent))
    assert any("aten::mm" in line for line in rest)


def test_an_implementation_with_another_loss_is_not_timed(monkeypatch):
    class Other(Ours):
        def __init__(self, problem):
            super().__init__(problem)
            self.name = "other"

        def step(self, mark):
            return super().step(mark) * 1.1

    build = bench_step.contender
    monkeypatch.setattr(
        bench_step, "contender", lambda name, p: Other(p) if name == "other" else build(name, p)
    )
    with pytest.raises(ValueError, match="do not do the same work"):
        measure(dataclasses.replace(SETTINGS, peers=("other",)), quiet)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": "huge"}, "expected one of"),
        ({"dtype": "fp8"}, "expected one of"),
        ({"peers": ("nobody",)}, "expected names out of"),
        ({"peers": ("dspark-float8",)}, "would run on cpu"),
    ],
)
def test_wrong_settings_say_what_is_expected(change, message):
    with pytest.raises(ValueError, match=message):
        measure(dataclasses.replace(SETTINGS, **change), quiet)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="use device=cpu"):
        measure(dataclasses.replace(SETTINGS, device="cuda"), quiet)


def test_the_command_without_hydra_writes_rows_and_measures_memory(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--geometry", "tiny", "--repeats", "1", "--warmup", "0", "--threads", "1", "--out", str(out)]
    assert main(arguments) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written[0]["peak_gib"] > 0
    assert str(out) in capsys.readouterr().out


def test_the_figure_names_every_part(rows):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from dspark.analysis.step_times import PHASES, draw_step_times

    _, ax = pyplot.subplots()
    draw_step_times(pd.DataFrame(rows), ax)
    names = {text.get_text() for text in ax.get_legend().get_texts()}
    assert names == {name for phase, (name, _) in PHASES.items() if phase.startswith("part:")}
    pyplot.close()
