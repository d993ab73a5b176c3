"""How a command ends when its caller made a mistake."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from experiments.cli import Task


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (lambda cfg: cfg.draft.prompt, "error: draft.prompt is not given; add draft.prompt=<value>"),
        (lambda cfg: int("x"), "error: invalid literal"),
    ],
)
def test_a_mistake_is_one_line_and_status_one(main, line, monkeypatch, capsys):
    monkeypatch.delenv("DSPARK_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        Task(main)(OmegaConf.create({"draft": {"prompt": "???"}}))
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    with pytest.raises(Exception, match=r"prompt|literal"):
        Task(main)(OmegaConf.create({"draft": {"prompt": "???"}}))
