"""Made-up slot tables whose truth is known: acceptance rates by design, a head that is off by a known amount."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
from hydra import compose, initialize
from scipy.special import expit

from dspark.runs import RunManifest, write_table
from experiments.calibrate import calibrate

DOMAINS = {"math": 1.8, "code": 1.3, "chat": 0.2}  # mean acceptance logit


def synthetic_slots(
    *,
    split: str,
    mode: str = "replay",
    prompts: int = 8,
    tokens: int = 60,
    num_proposals: int = 5,
    heat: float = 1.0,
    shift: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """A slot table of `prompts` documents a domain, `tokens` response tokens each.

    The acceptance logit of a slot is its domain's mean plus noise; the head reports sigmoid(heat * (logit + noise) + shift),
    so temperature `heat` undoes it when shift and noise are 0. Replay tables hold every anchor with its expected visits,
    decode tables one walk with 0/1 outcomes.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for domain, level in DOMAINS.items():
        for prompt in range(prompts):
            truth = level + 1.2 * rng.standard_normal((tokens, num_proposals))
            keep = (rng.random(truth.shape) < expit(truth)).astype(float)
            if mode == "replay":
                keep = np.clip(keep * 0.7 + 0.3 * expit(truth), 0, 1)
            said = heat * (truth + noise * rng.standard_normal(truth.shape)) + shift
            parts.append(_document(domain, f"{split}-{domain}-{prompt}", truth, keep, said, mode, rng))
    table = pd.concat(parts, ignore_index=True)
    return table.assign(
        run_id="synthetic", dataset=split, temperature=1.0, draft_sampling="sampled", mode=mode
    )


def _document(domain, prompt_id, truth, keep, said, mode, rng) -> pd.DataFrame:
    tokens, width = truth.shape
    anchor, position = np.meshgrid(np.arange(tokens - 1), np.arange(1, width + 1), indexing="ij")
    inside = anchor + position < tokens
    keep = keep[: tokens - 1] * inside
    alive = np.cumprod(keep, axis=1)
    visit = np.zeros(tokens + width + 1)
    visit[0] = 1.0
    for a in range(tokens - 1):
        survives = np.concatenate([[1.0], alive[a], [0.0]])
        if mode == "decode" and visit[a]:
            visit[a + 1 + int(alive[a].sum())] = 1.0
        elif mode == "replay":
            visit[a + 1 : a + width + 2] += visit[a] * (survives[:-1] - survives[1:])
    before = np.concatenate([np.ones((tokens - 1, 1)), alive[:, :-1]], axis=1)
    reached = visit[: tokens - 1, None] * before
    guess = expit(0.8 * truth[: tokens - 1] + 0.6 * rng.standard_normal(keep.shape))
    table = pd.DataFrame(
        {
            "domain": domain,
            "prompt_id": prompt_id,
            "doc_id": f"doc-{prompt_id}",
            "anchor": anchor[inside] + 11,
            "position": position[inside],
            "reached": reached[inside],
            "accepted": (reached * keep)[inside],
            "r": keep[inside],
            "alpha": expit(truth[: tokens - 1])[inside],
            "confidence": expit(said[: tokens - 1])[inside],
            "p_prefix_survives": np.cumprod(expit(said[: tokens - 1]), axis=1)[inside],
            "entropy": (2 * (1 - guess))[inside],
            "max_prob": guess[inside],
            "margin": np.clip(2 * guess - 1, 0, 1)[inside],
        }
    )
    if mode == "decode":
        table = table[np.repeat(visit[: tokens - 1], inside.sum(1)) > 0]
        table = table.assign(r=table["r"].where(table["reached"] > 0))
    return table


def made_up_run(folder: Path, slots: dict[str, pd.DataFrame]) -> Path:
    """A run folder that holds nothing but a manifest and the slot tables of its evaluations."""
    folder.mkdir(parents=True)
    manifest = RunManifest(
        run_id=folder.name, command="", overrides=[], config_sha="", seed=0, verifier={}, data={}, parent=None
    )
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    for name, table in slots.items():
        write_table(table, folder / "eval" / name / "slots.parquet")
    return folder


@functools.cache
def calibrated_run() -> Path:
    """A run with `validation` and `test` slots, a head whose logits are 2.5 times too large, and its calibration.

    Made once for all test files of a process; nobody may write into it.
    """
    folder = Path(tempfile.mkdtemp(prefix="dspark-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tables = {
        split: synthetic_slots(split=split, prompts=16, tokens=50, num_proposals=2, heat=2.5, seed=seed)
        for seed, split in enumerate(("validation", "test"))
    }
    run = made_up_run(folder / "a_run", tables)
    with initialize(version_base="1.3", config_path="../configs"):
        quick = ["min_rounds=100", "bootstrap.draws=5", "grid.points=41", "thresholds=3"]
        calibrate(compose("calibrate", overrides=[f"run={run}", *quick]))
    return run
