"""Step-cost tables: what a point means, between points, beyond them, and on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.costs import CostTable, fit_hinge

SHIPPED = sorted((Path(__file__).parent.parent / "configs" / "cost").glob("*.json"))


def table(**changes) -> CostTable:
    fields = {
        "name": "t",
        "kind": "typed",
        "interpolation": "linear",
        "tokens": np.array([1, 8, 16]),
        "verify_ms": np.array([10.0, 17.0, 33.0]),
        "draft_requests": np.array([1, 11]),
        "draft_ms": np.array([1.0, 2.0]),
        "provenance": {},
    }
    return CostTable(**{**fields, **changes})


def test_linear_tables_join_their_points():
    assert table().verify_ms_at(np.array([1, 2, 8, 12])).tolist() == [10.0, 11.0, 17.0, 25.0]


def test_step_tables_pad_to_the_next_listed_size():
    assert table(interpolation="step").verify_ms_at(np.array([1, 2, 8, 9, 16])).tolist() == [
        10.0,
        17.0,
        17.0,
        33.0,
        33.0,
    ]


def test_beyond_the_last_point_time_rises_with_the_tables_slope_and_is_flagged():
    tokens = np.arange(1, 11)
    t = table(tokens=tokens, verify_ms=3.0 + 2.0 * tokens)
    assert t.verify_ms_at(np.array([10, 20])) == pytest.approx([23.0, 43.0])
    assert t.is_extrapolated(np.array([10, 11])).tolist() == [False, True]


def test_sps_is_the_inverse_of_draft_plus_verify():
    sps = table().sps(requests=6, max_tokens=16)
    assert len(sps) == 17
    assert sps[0] == 0
    assert sps[8] == pytest.approx(1000 / (17.0 + 1.5))


def test_without_draft_points_drafting_costs_nothing_until_typed_in():
    t = table(draft_requests=np.array([], dtype=int), draft_ms=np.array([]))
    assert not t.has_draft
    assert t.draft_ms_at(np.array([1, 5])).tolist() == [0.0, 0.0]
    typed = t.with_draft(fixed_ms=2.0, per_request_ms=0.5)
    assert typed.draft_ms_at(np.array([4, 2000])) == pytest.approx([4.0, 1002.0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "guessed"}, "kind is 'guessed'"),
        ({"interpolation": "cubic"}, "'linear', 'step'"),
        ({"tokens": np.array([1, 8])}, "2 verify sizes and 3 times"),
        ({"tokens": np.array([8, 1, 16])}, "must rise"),
        ({"tokens": np.array([0, 8, 16])}, "must rise"),
        ({"verify_ms": np.array([1.0, 0.0, 2.0])}, "positive"),
        ({"draft_ms": np.array([1.0])}, "2 draft sizes and 1 times"),
    ],
)
def test_impossible_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        table(**changes)


def test_files_round_trip(tmp_path):
    path = tmp_path / "t.json"
    for original in (table(), table(draft_requests=np.array([], dtype=int), draft_ms=np.array([]))):
        original.write(path)
        again = CostTable.read(path)
        for name, value in vars(original).items():
            np.testing.assert_array_equal(getattr(again, name), value)


def test_foreign_broken_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(FileNotFoundError, match=r"experiments\.bench steps"):
        CostTable.read(path)
    table().write(path)
    content = json.loads(path.read_text())
    for text, message in (
        ("[1", "not JSON"),
        (json.dumps(content | {"version": 7}), "version 1"),
        (json.dumps({k: v for k, v in content.items() if k != "tokens"}), r"lacks \['tokens'\]"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            CostTable.read(path)


def test_the_hinge_recovers_a_floor_a_knee_and_a_slope():
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    fitted = fit_hinge(table(tokens=tokens, verify_ms=5.0 + 0.25 * np.maximum(0, tokens - 32)))
    assert fitted.provenance["knee"] == 32
    assert fitted.provenance["floor_ms"] == pytest.approx(5.0)
    assert fitted.provenance["ms_per_token"] == pytest.approx(0.25)
    assert fitted.provenance["residual"] == pytest.approx(0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9))
def test_a_fitted_curve_is_convex_whatever_the_noise(noise):
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    fitted = fit_hinge(table(tokens=tokens, verify_ms=(5.0 + 0.5 * tokens) * np.array(noise)))
    assert fitted.kind == "fitted"
    assert fitted.is_convex(300)


def test_a_curve_that_falls_is_refused_by_the_fit():
    with pytest.raises(ValueError, match="falls with the number of tokens"):
        fit_hinge(table(verify_ms=np.array([30.0, 20.0, 1.0])))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_tables_read_and_say_where_they_come_from(path):
    shipped = CostTable.read(path)
    assert shipped.name == path.stem
    assert shipped.provenance
    assert (np.diff(shipped.verify_ms_at(np.arange(1, 4096))) >= -0.25 * shipped.verify_ms.max()).all()


def test_the_jagged_example_is_not_convex():
    jagged = CostTable.read(next(p for p in SHIPPED if p.stem == "jagged_synthetic"))
    assert jagged.kind == "typed"
    assert not jagged.is_convex(512)


def test_the_gpu_table_is_nearly_flat_dips_and_stays_positive_where_it_is_extrapolated():
    gpu = CostTable.read(next(p for p in SHIPPED if p.stem == "smollm2_h200"))
    assert gpu.kind == "measured"
    assert gpu.provenance["cuda_graph"]
    assert not gpu.has_draft
    dip = gpu.verify_ms_at(np.array([192, 256]))
    assert dip[1] < dip[0]
    assert gpu.verify_ms_at(np.array([512]))[0] < 3 * gpu.verify_ms_at(np.array([1]))[0]
    assert not gpu.is_convex(256)
    beyond = np.arange(1025, 4097)
    assert gpu.is_extrapolated(beyond).all()
    assert (np.diff(gpu.sps(requests=256, max_tokens=4096)[beyond]) <= 0).all()
