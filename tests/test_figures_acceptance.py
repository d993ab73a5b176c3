"""Acceptance figures: each draws the numbers of its table, and nothing else."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from dspark.analysis import acceptance as figures
from dspark.analysis.style import panels, use_style
from dspark.walkthrough import walk_table


@pytest.fixture
def ax():
    use_style()
    (ax,) = panels(1)
    yield ax
    ax.figure.canvas.draw()  # fonts, ticks and layouts are only tried out when drawn
    plt.close(ax.figure)


def positions(domains=("math", "chat", "all")) -> pd.DataFrame:
    rows = []
    for shift, domain in enumerate(domains):
        alive = 1.0
        for i in range(1, 4):
            rate = 0.8 - 0.1 * i - 0.05 * shift
            lost = alive * (1 - rate) * (4 - i)
            alive *= rate
            rows.append(
                {
                    "domain": domain, "position": i, "prompts": 20, "reached": 400.0,
                    "conditional": rate, "conditional_low": rate - 0.05, "conditional_high": rate + 0.05,
                    "survival": alive, "survival_low": alive - 0.05, "survival_high": alive + 0.05, "lost": lost,
                }
            )  # fmt: skip
        rows.append({"domain": domain, "position": 4, "prompts": 20, "lost": 0.2})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("draw", "column"),
    [(figures.plot_conditional_acceptance, "conditional"), (figures.plot_survival, "survival")],
)
def test_curves_show_every_domain_by_position(ax, draw, column):
    frame = positions()
    assert draw(frame, ax) is ax
    drawn = {line.get_label(): line for line in ax.lines}
    assert set(drawn) == {"math", "chat", "mean"}
    expected = frame[(frame["domain"] == "math") & frame[column].notna()]
    np.testing.assert_allclose(drawn["math"].get_ydata(), expected[column])
    assert drawn["math"].get_xdata().tolist() == [1, 2, 3]  # counted from 1, the rest beyond N left out
    assert len(ax.collections) == 3  # an interval each


def test_sets_of_one_domain_are_curves_of_their_own():
    one = pd.DataFrame({"dataset": ["mine-test"] * 3, "domain": ["math", "chat", "all"]})
    assert figures.curve_names(one).tolist() == ["math", "chat", "all"]
    several = ["gsm8k-test-t0", "math500-t0.7-decode", "arena-hard-200-test-t1-sampled", "all"]
    frame = pd.DataFrame({"dataset": several, "domain": ["math", "math", "chat", "all"]})
    assert figures.curve_names(frame).tolist() == ["gsm8k", "math500", "arena-hard-200", "all"]


def test_rates_of_hardly_reached_positions_are_left_out(ax):
    frame = positions(("math",))
    frame.loc[frame["position"] == 3, "reached"] = 12.0
    figures.plot_conditional_acceptance(frame, ax)
    assert ax.lines[0].get_xdata().tolist() == [1, 2]


def test_domains_never_share_a_colour():
    labels = ["math", "self", "code", "law", "all"]
    assert len(set(figures.colours(labels).values())) == len(labels)
    assert len(set(figures.colours([str(i) for i in range(9)]).values())) == 9


def test_lost_length_bars_add_up_to_the_block(ax):
    frame = positions()
    figures.plot_lost_length(frame, ax)
    widths = pd.Series([bar.get_width() for bar in ax.patches])
    rows = pd.Series([round(bar.get_y() + bar.get_height() / 2) for bar in ax.patches])
    assert widths.groupby(rows).sum().tolist() == pytest.approx([3.0] * 3)
    assert (widths >= -1e-9).all()


def test_tau_is_labelled_and_the_mean_comes_last(ax):
    table = pd.DataFrame(
        {
            "dataset": ["gsm8k", "mbpp", "all"],
            "tau": [2.4, 3.1, 2.75],
            "tau_low": [2.2, np.nan, 2.6],
            "tau_high": [2.6, np.nan, 2.9],
            "temperature": 0.0,
        }
    )
    figures.plot_tau(table, ax, hue="temperature")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["mean of datasets", "gsm8k", "mbpp"]
    assert {text.get_text() for text in ax.texts} == {"2.40", "3.10", "2.75"}
    assert ax.get_legend().get_texts()[0].get_text() == "temperature 0"


def test_depth_keeps_the_order_of_bins(ax):
    depths = pd.DataFrame(
        {"domain": "math", "depth": [64, 0, 16], "tau": [1.5, 2.5, 2.0], "tau_low": 1.0, "tau_high": 3.0}
    )
    figures.plot_depth(depths, ax)
    assert ax.lines[0].get_ydata().tolist() == [2.5, 2.0, 1.5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0+", "16+", "64+"]


def test_transitions_and_repairs_can_show_any_token(ax):
    """Spaces, line ends, dollars and empty tokens must survive Matplotlib's text engine."""
    tokens = [" the", "\n", "$", "", "a_very_long_token", "ñ"]
    grid = pd.DataFrame(
        [(a, b, float(i - j)) for i, a in enumerate(tokens) for j, b in enumerate(tokens)],
        columns=["previous", "next", "bias"],
    )
    figures.plot_transitions(grid.iloc[:30], ax)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:4] == ["␣the", "⏎", r"\$", "∅"]
    assert len(labels[4]) == 12


def test_repairs_point_right_and_breaks_left(ax):
    repairs = pd.DataFrame(
        {
            "kind": ["repaired", "broken", "repaired"],
            "position": [1, 1, 2],
            "previous": ["a", "a", "b"],
            "base": ["x", "x", "y"],
            "final": ["y", "y", "z"],
            "count": [5, 2, 3],
        }
    )
    figures.plot_repairs(repairs, ax)
    widths = sorted(bar.get_width() for bar in ax.patches)
    assert widths == [-2, 0, 3, 5]
    assert ax.get_legend().get_texts()[0].get_text() == "repaired (8 in all)"


def test_block_frames_the_choices_by_outcome(ax):
    walk = {
        "proposals": [
            {"position": 1, "final": [("a", 0.7), ("b", 0.2)], "draft": "a", "text": "a", "kept": True},
            {"position": 2, "final": [("c", 0.6), ("d", 0.3)], "draft": "c", "text": "d", "kept": False},
            {"position": 3, "final": [("e", 0.9), ("f", 0.1)], "draft": "e"},
        ]
    }
    table = walk_table(walk, "final")
    assert table.loc[table["chosen"], "kept"].tolist() == [True, False, None]
    figures.plot_block(table, ax, width=4, title="with the head")
    assert len({patch.get_edgecolor() for patch in ax.patches}) == 3
    assert ax.get_xlim() == (0.5, 4.5)
