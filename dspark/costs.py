"""What a step costs: tables of milliseconds against tokens verified together, and SPS(B), their inverse.

A table is a JSON file:

    {"format": "dspark-step-cost", "version": 1, "name": ..., "kind": "typed" | "fitted" | "measured",
     "interpolation": "linear" | "step", "tokens": [...], "verify_ms": [...],
     "draft": null | {"requests": [...], "ms": [...]}, "provenance": {...}}

`tokens` are verifier input tokens of one step over all requests, `verify_ms` the time of the verifier's forward.
`draft` is the time to draft one block for so many requests at once. `linear` joins the points; `step` pads to the next
listed size, as engines with captured graphs do. Above the last point both rise with the least-squares slope of the
table's upper half (with three points or fewer: of the last segment), and `is_extrapolated` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

FORMAT = "dspark-step-cost"
VERSION = 1
KINDS = ("typed", "fitted", "measured")
INTERPOLATIONS = ("linear", "step")

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Step costs in milliseconds; see the module's description for the fields. Draft arrays are empty when not known."""

    name: str
    kind: str
    interpolation: str
    tokens: Array
    verify_ms: Array
    draft_requests: Array
    draft_ms: Array
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"cost table {self.name}: kind is {self.kind!r}; expected one of {KINDS}.")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"cost table {self.name}: interpolation is {self.interpolation!r}; expected one of {INTERPOLATIONS}."
            )
        for what, at, ms, fewest in (
            ("verify", self.tokens, self.verify_ms, 2),
            ("draft", self.draft_requests, self.draft_ms, 0),
        ):
            if len(at) != len(ms) or len(at) < fewest or len(at) == 1:
                raise ValueError(
                    f"cost table {self.name}: {len(at)} {what} sizes and {len(ms)} times; expected as many of each, and two or more."
                )
            if len(at) and (at[0] < 1 or (np.diff(at) <= 0).any() or not (ms > 0).all()):
                raise ValueError(
                    f"cost table {self.name}: {what} sizes must rise from 1 or more, and times must be positive."
                )

    @property
    def has_draft(self) -> bool:
        return len(self.draft_requests) > 0

    def verify_ms_at(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Milliseconds of one verifier forward over `tokens` tokens."""
        return _at(self.tokens, self.verify_ms, tokens, self.interpolation)

    def draft_ms_at(self, requests: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Milliseconds to draft a block for each of `requests` requests together; 0 if the table does not know."""
        if not self.has_draft:
            return np.zeros(np.shape(requests))
        return _at(self.draft_requests, self.draft_ms, requests, self.interpolation)

    def step_ms(self, tokens: Int[Array, "*shape"], requests: int) -> Float[Array, "*shape"]:
        """Milliseconds of a whole speculative step: draft for `requests`, then verify `tokens`."""
        return np.asarray(self.verify_ms_at(tokens) + self.draft_ms_at(np.asarray(requests)))

    def sps(self, *, requests: int, max_tokens: int) -> Float[Array, " B"]:
        """SPS(B) for B = 0..max_tokens: speculative steps a second with `requests` requests. Entry 0 is 0."""
        return np.concatenate([[0.0], 1000.0 / self.step_ms(np.arange(1, max_tokens + 1), requests)])

    def is_extrapolated(self, tokens: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return np.asarray(np.asarray(tokens) > self.tokens[-1])

    def is_convex(self, max_tokens: int) -> bool:
        """Whether seconds a step are convex up to `max_tokens`; Algorithm 1 then finds the global optimum."""
        return bool(
            (
                np.diff(self.verify_ms_at(np.arange(1, max_tokens + 1)), 2) >= -1e-9 * self.verify_ms.max()
            ).all()
        )

    def with_draft(self, *, fixed_ms: float, per_request_ms: float) -> CostTable:
        """The same verifier with a typed-in draft cost fixed_ms + per_request_ms * requests."""
        at = np.array([1, 1024])
        return CostTable(**{**vars(self), "draft_requests": at, "draft_ms": fixed_ms + per_request_ms * at})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = (
            {"requests": self.draft_requests.tolist(), "ms": self.draft_ms.tolist()}
            if self.has_draft
            else None
        )
        content = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "kind": self.kind,
            "interpolation": self.interpolation,
            "tokens": self.tokens.tolist(),
            "verify_ms": self.verify_ms.tolist(),
            "draft": draft,
            "provenance": dict(self.provenance),
        }
        partial = path.with_suffix(".json.tmp")
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Raises FileNotFoundError, or ValueError if the file is no step-cost table of this version."""
        if not path.is_file():
            raise FileNotFoundError(
                f"no cost table at {path}; measure one with `python -m experiments.bench steps`."
            )
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}).") from error
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or content.get("version") != VERSION
        ):
            raise ValueError(f"{path} is not a {FORMAT} file of version {VERSION}.")
        missing = [
            k
            for k in ("name", "kind", "interpolation", "tokens", "verify_ms", "draft", "provenance")
            if k not in content
        ]
        if missing:
            raise ValueError(f"{path} lacks {missing}.")
        draft = content["draft"] or {"requests": [], "ms": []}
        return cls(
            name=content["name"],
            kind=content["kind"],
            interpolation=content["interpolation"],
            tokens=np.array(content["tokens"], dtype=np.int64),
            verify_ms=np.array(content["verify_ms"], dtype=np.float64),
            draft_requests=np.array(draft["requests"], dtype=np.int64),
            draft_ms=np.array(draft["ms"], dtype=np.float64),
            provenance=content["provenance"],
        )


def _at(sizes: Array, ms: Array, wanted: Int[Array, "*shape"], interpolation: str) -> Float[Array, "*shape"]:
    wanted = np.asarray(wanted)
    if interpolation == "step":
        inside = ms[np.minimum(np.searchsorted(sizes, wanted), len(sizes) - 1)]
    else:
        inside = np.interp(wanted, sizes, ms)
    upper = slice(len(sizes) // 2 if len(sizes) > 3 else -2, None)
    slope = max(float(np.polyfit(sizes[upper], ms[upper], 1)[0]), 0.0)
    return np.where(wanted > sizes[-1], ms[-1] + slope * (wanted - sizes[-1]), inside)


def fit_hinge(table: CostTable) -> CostTable:
    """A two-part curve through measured points: flat up to a knee, then a straight line, by least squares.

        ms(B) = floor + slope * max(0, B - knee)

    The knee is searched over the table's sizes, floor and slope are solved for. Convex, so that measurement noise does
    not stop the scheduler early. `provenance.residual` is the largest relative error at a point.
    """
    x, y = table.tokens.astype(np.float64), table.verify_ms
    best: tuple[float, float, float, float] | None = None
    for knee in x[:-1]:
        design = np.stack([np.ones_like(x), np.maximum(0.0, x - knee)], axis=1)
        (floor, slope), *_ = np.linalg.lstsq(design / y[:, None], np.ones_like(y), rcond=None)
        error = float((((design @ np.array([floor, slope])) / y - 1) ** 2).sum())
        if slope >= 0 and floor > 0 and (best is None or error < best[0]):
            best = (error, float(knee), float(floor), float(slope))
    if best is None:
        raise ValueError(
            f"cost table {table.name} falls with the number of tokens; no flat-then-rising curve fits it."
        )
    _, knee, floor, slope = best
    fitted = floor + slope * np.maximum(0.0, x - knee)
    residual = float(np.abs(fitted / y - 1).max())
    provenance = {
        **table.provenance,
        "fitted_to": table.name,
        "knee": knee,
        "floor_ms": floor,
        "ms_per_token": slope,
        "residual": residual,
    }
    at = np.unique([table.tokens[0], int(knee), table.tokens[-1]])
    return CostTable(
        **{
            **vars(table),
            "name": f"{table.name}_fitted",
            "kind": "fitted",
            "interpolation": "linear",
            "tokens": at,
            "verify_ms": floor + slope * np.maximum(0.0, at - knee),
            "provenance": provenance,
        }
    )
