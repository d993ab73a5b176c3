"""The calibration and scheduling notebooks run from their tables alone, without a kernel, and draw every figure."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from hydra import compose, initialize

from experiments.simulate import simulate
from tests.slot_tables import calibrated_run

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def simulations(tmp_path_factory) -> Path:
    folder, run = tmp_path_factory.mktemp("simulation"), calibrated_run()
    small = ["lanes=64", "replicas=4", "steps=4", "warmup=1", "concurrency=[1,16]", "thresholds=[0.5]"]
    with initialize(version_base="1.3", config_path="../configs"):
        for costs in ("smollm2_cpu", "jagged_synthetic"):
            overrides = [f"run={run}", f"costs={costs}", f"out={folder / costs}", *small]
            simulate(compose("simulate", overrides=overrides))
    return folder


def cells_of(name: str) -> list[dict]:
    return json.loads((NOTEBOOKS / name).read_text())["cells"]


@pytest.mark.parametrize(
    "name, figures", [("04_confidence_calibration.ipynb", 4), ("05_scheduling.ipynb", 4)]
)
def test_the_notebook_runs_on_small_tables(name, figures, simulations, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setenv("DSPARK_CALIBRATION_FOLDER", str(calibrated_run() / "calibration"))
    monkeypatch.setenv("DSPARK_SIMULATION_FOLDER", str(simulations))
    plt.close("all")
    scope: dict = {}
    with matplotlib.rc_context():
        for cell in cells_of(name):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), name, "exec"), scope)
        open_figures = [plt.figure(number) for number in plt.get_fignums()]
        assert len(open_figures) == figures
        for figure in open_figures:
            figure.canvas.draw()
            assert all(ax.lines for ax in figure.axes)
    plt.close("all")
    assert "a_run" in scope["source"]


@pytest.mark.parametrize("name", ["04_confidence_calibration.ipynb", "05_scheduling.ipynb"])
def test_the_notebook_keeps_to_its_form(name):
    cells = cells_of(name)
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    assert not any(line.lstrip().startswith("def ") for text in code for line in text.splitlines())
    assert sum(bool(line.strip()) for text in code for line in text.splitlines()) <= 70
    assert "**Question.**" in "".join(cells[0]["source"])
