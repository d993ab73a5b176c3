"""Notebooks 01 and 02 run from their tables alone, without a kernel, and draw every figure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from dspark.runs import Run
from experiments import evaluate
from tests.test_evaluate import config, write_prompts

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NAMES = ("01_follow_one_block.ipynb", "02_acceptance_curves.ipynb")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """What the committed results folder holds, from the tiny run."""
    root = tmp_path_factory.mktemp("acceptance")
    run = Run(Path(shutil.copytree(tiny.run.path, root / "runs" / tiny.run.path.name)))
    common = {"run": str(run.path), "cache": str(tiny.greedy.path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "load_verifier", lambda cfg: tiny.verifier)
        evaluate.replay_sets(config(**common, out=str(root / "replay")))
        evaluate.walk(config(**common, split="train", mode="walk", limit=5, out=str(root / "walk")))
        prompts = [write_prompts(root / f"{name}.jsonl", count=3) for name in ("gsm8k", "mbpp")]
        evaluate.decode_sets(
            config(
                run=str(run.path),
                mode="decode",
                prompts=prompts,
                temperature=[0, 1],
                max_new_tokens=8,
                out=str(root / "decode"),
            )
        )
    return root


def cells_of(name: str) -> list[dict]:
    return json.loads((NOTEBOOKS / name).read_text())["cells"]


def test_tables_carry_a_manifest(folder, tiny):
    for name in ("replay", "walk", "decode"):
        manifest = json.loads((folder / name / "manifest.json").read_text())
        assert list(manifest["runs"]) == [tiny.run.path.name]
    assert {row["dataset"] for row in manifest["sets"]} == {
        f"{name}-t{t}-decode" for name in ("gsm8k", "mbpp") for t in (0, 1)
    }


@pytest.mark.parametrize(("name", "figures"), [(NAMES[0], 2), (NAMES[1], 4)])
def test_the_notebook_runs_on_small_tables(name, figures, folder, tiny, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setenv("DSPARK_WALK_FOLDER", str(folder / "walk"))
    monkeypatch.setenv("DSPARK_ACCEPTANCE_FOLDER", str(folder))
    plt.close("all")
    scope: dict = {}
    with matplotlib.rc_context():
        for cell in cells_of(name):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), name, "exec"), scope)
        drawn = [plt.figure(number) for number in plt.get_fignums()]
        assert len(drawn) == figures
        for figure in drawn:
            figure.canvas.draw()
    plt.close("all")
    assert tiny.run.path.name in scope["source"]


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_keeps_to_its_form(name):
    cells = cells_of(name)
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    assert not any(line.lstrip().startswith("def ") for text in code for line in text.splitlines())
    assert sum(bool(line.strip()) for text in code for line in text.splitlines()) <= 70
    assert "**Question.**" in "".join(cells[0]["source"])
