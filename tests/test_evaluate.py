"""The evaluate command: what it writes, its tables, and the mistakes it names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from dspark.analysis import tables
from dspark.data.synthetic import tiny_verifier
from dspark.evaluation import ROUND_COLUMNS, SLOT_COLUMNS, summarise
from dspark.runs import Run, save_draft
from experiments import demo, evaluate
from experiments.cli import CONFIGS
from tests.trained import build_cache, new_draft, save_run, template_prompts

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(tiny, tmp_path) -> Run:
    """A copy of the trained run that a test may write to."""
    return Run(Path(shutil.copytree(tiny.run.path, tmp_path / tiny.run.path.name)))


@pytest.fixture
def own_verifier(tiny, monkeypatch):
    """Commands get the trained tiny verifier whatever their `verifier` group says."""
    for module in (evaluate, demo):
        monkeypatch.setattr(module, "load_verifier", lambda cfg: tiny.verifier)


def config(name: str = "evaluate", **changes):
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        cfg = compose(name)
    quiet = (
        {"progress": False, "bootstrap": {"draws": 200, "level": 0.95, "seed": 0}}
        if name == "evaluate"
        else {}
    )
    for key, value in {**quiet, **changes}.items():
        cfg[key] = value
    return cfg


def write_prompts(path: Path, *, count: int = 4, turns: int = 1, empty: bool = False) -> str:
    prompts = template_prompts(count, seed=51, split="test", turns=turns)
    rows = [{"turns": [m["content"] for m in p.messages]} for p in prompts]
    if empty:
        rows.insert(1, {"turns": ["a question", " "]})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def test_replay_split_writes_what_training_reports(tiny, run):
    summary = evaluate.replay_split(run, tiny.greedy, split="test")
    folder = run.eval_folder("greedy-test")
    slots, rounds = (pd.read_parquet(folder / f"{name}.parquet") for name in ("slots", "rounds"))
    assert list(slots) == SLOT_COLUMNS
    assert list(rounds) == ROUND_COLUMNS
    assert summary == summarise(slots, rounds)
    assert json.loads((folder / "summary.json").read_text())["includes_bonus_token"] is True
    assert 1.0 < summary["tau"] <= 1 + tiny.draft.config.num_proposals
    for name in ("conditional_acceptance", "survival", "alpha"):
        assert all(0.0 <= value <= 1.0 for value in summary[name])
    assert set(rounds["doc_id"]) == {tiny.greedy.info(d).doc_id for d in tiny.greedy.select(split="test")}


def test_compare_replays_both_runs_and_pairs_their_prompts(tiny, run, tmp_path, capsys):
    other = save_run(tmp_path, new_draft(tiny.greedy), tiny.greedy, run_id="untrained")
    evaluate.replay_sets(config(compare=[str(run.path), str(other.path)], cache=str(tiny.greedy.path)))
    out = run.path / "eval" / "tables-replay"
    table = pd.read_csv(out / "acceptance.csv")
    assert set(table["run_id"]) == {run.path.name, "untrained"}
    macro = table[(table["domain"] == "all")].set_index("run_id")
    by_domain = table[table["domain"] != "all"].groupby("run_id")["tau"].mean()
    assert macro["tau"].to_dict() == pytest.approx(by_domain.to_dict(), abs=1e-4)
    assert (table["tau_low"] <= table["tau"]).all()
    assert (table["tau"] <= table["tau_high"]).all()
    paired = pd.read_parquet(out / "paired.parquet")
    worse = paired[paired["domain"] == "all"].iloc[0]
    assert worse["difference_high"] < 0  # an untrained draft is worse on the same prompts
    assert worse["better"] == 0.0
    assert (out / "positions.md").read_text().startswith("| run_id |")
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("tau ")


def test_decode_counts_positions_without_diagnostics_too(tiny, run, own_verifier, tmp_path):
    path = write_prompts(tmp_path / "gsm8k.jsonl", count=3)
    tables = {}
    for diagnostics in (True, False):
        cfg = config(
            run=str(run.path),
            mode="decode",
            prompts=path,
            max_new_tokens=16,
            batch_size=4,
            diagnostics=diagnostics,
            plain=False,
            out=str(tmp_path / f"{diagnostics}"),
        )
        evaluate.decode_sets(cfg)
        tables[diagnostics] = pd.read_parquet(tmp_path / f"{diagnostics}" / "positions.parquet")
    assert (tables[True]["reached"].fillna(0) > 0).any()
    pd.testing.assert_frame_equal(tables[True], tables[False])


def test_decode_answers_files_and_every_turn(tiny, run, own_verifier, tmp_path, capsys):
    paths = [
        write_prompts(tmp_path / "gsm8k.jsonl", empty=True),
        write_prompts(tmp_path / "mt-bench.jsonl", count=3, turns=2),
    ]
    cfg = config(
        run=str(run.path), mode="decode", prompts=paths, temperature=[0, 1], max_new_tokens=16, batch_size=4
    )
    evaluate.decode_sets(cfg)
    printed = capsys.readouterr().out
    assert "left out {'empty_turn': 1}" in printed
    table = pd.read_parquet(run.path / "eval" / "tables-decode" / "acceptance.parquet")
    assert set(table["dataset"]) == {
        "gsm8k-t0-decode", "gsm8k-t1-decode", "mt-bench-t0-decode", "mt-bench-t1-decode", "all",
    }  # fmt: skip
    assert set(table.set_index("dataset").loc["gsm8k-t0-decode", ["domain"]]) == {"math"}
    rows = [
        json.loads(line)
        for line in (run.eval_folder("mt-bench-t0-decode") / "decoded.jsonl").read_text().splitlines()
    ]
    assert [row["turn"] for row in rows] == [0, 1] * 3
    assert rows[1]["prompt"].startswith(rows[0]["prompt"] + rows[0]["text"].removesuffix("<|end|>"))
    assert all(sum(row["kept"]) < len(row["token_ids"]) <= 16 for row in rows)
    summary = json.loads((run.eval_folder("mt-bench-t0-decode") / "summary.json").read_text())
    assert summary["greedy_text_against_plain"] == {"equal": 6}
    assert summary["speed"]["plain_tokens_per_s"] > 0
    rounds = pd.read_parquet(run.eval_folder("mt-bench-t1-decode") / "rounds.parquet")
    assert (rounds["verify_ms"] > 0).all()
    assert rounds[["temperature", "top_k", "top_p"]].drop_duplicates().to_numpy().tolist() == [[1.0, 0, 1.0]]


def test_benchmark_counts_equal_rounds(tiny, run, own_verifier):
    evaluate.benchmark(config(run=str(run.path), cache=str(tiny.greedy.path), split="test", batch_size=8))
    result = json.loads((run.eval_folder("benchmark") / "benchmark.json").read_text())
    assert result["equal_rounds"] == result["rounds"] > 50
    assert result["tau_replay"] == result["tau_decode"]
    assert result["ratio"] > 1.0


def test_walk_shows_a_real_greedy_round(tiny, run, own_verifier):
    evaluate.walk(config(run=str(run.path), cache=str(tiny.greedy.path), split="train", mode="walk", limit=6))
    folder = run.eval_folder("walk")
    record = json.loads((folder / "walk.json").read_text())
    proposals = record["proposals"]
    kept = [p["kept"] for p in proposals if p["reached"]]
    assert kept == [True] * record["kept"] + [False] * (record["kept"] < len(proposals))
    assert all(p["draft"] == p["final"][0][0] for p in proposals)
    assert proposals[1]["previous"] == proposals[0]["draft"]  # on its own drafts, not on the text
    assert record["slots"][0]["input"] == record["anchor_token"]
    assert {s["input"] for s in record["slots"][1:]} == {"<|mask|>"}
    changes = pd.read_parquet(folder / "head_changes.parquet")
    assert (
        changes.loc[changes["kind"] == "repaired", "base"]
        != changes.loc[changes["kind"] == "repaired", "final"]
    ).all()
    table = pd.read_parquet(folder / "transitions.parquet")
    best = table.loc[table.groupby("previous")["bias"].idxmax()]
    assert len(best) == 14
    assert (best["bias"] > 0).all()


def test_lossless_mode_accepts_this_decoder_and_refuses_a_foreign_text(
    tiny, run, own_verifier, tmp_path, capsys
):
    path = write_prompts(tmp_path / "prompts.jsonl")
    cfg = config(
        run=str(run.path),
        mode="lossless",
        prompts=path,
        max_new_tokens=12,
        samples=400,
        sample_prompts=1,
        draft_sampling="sampled",
    )
    evaluate.check_lossless(cfg)
    assert (
        capsys.readouterr().out.strip().splitlines()[-1].startswith("lossless: prompts: greedy {'equal': 4}")
    )

    cfg = config(run=str(run.path), mode="decode", prompts=path, max_new_tokens=12, temperature=0)
    evaluate.decode_sets(cfg)
    log = run.eval_folder("prompts-t0-decode") / "decoded.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    row = max(rows, key=lambda row: len(row["token_ids"]))
    row["token_ids"][1] = (row["token_ids"][1] + 1) % 250
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(map(json.dumps, rows)))
    evaluate.check_lossless(config(mode="lossless", log_a=str(log), log_b=str(log)))
    with pytest.raises(ValueError, match="1 of 4 greedy texts differ without a tie"):
        evaluate.check_lossless(config(mode="lossless", log_a=str(log), log_b=str(changed)))


def test_demo_streams_the_verifiers_text(tiny, run, own_verifier, capsys):
    cfg = config("demo", run=None, runs=str(run.path.parent), prompt="3+4?", max_new_tokens=20)
    demo.main.__wrapped__(cfg)
    printed = capsys.readouterr().out
    assert "same text" in printed
    assert "tokens/s with the draft (tau " in printed


def test_cache_of_another_verifier_is_refused_with_both_fingerprints(tiny, run, tmp_path):
    stranger = tiny_verifier(hidden_size=48, seed=5)
    cache = build_cache(
        tmp_path / "other",
        stranger,
        template_prompts(3, seed=1, split="test"),
        temperature=0.0,
        max_new_tokens=4,
    )
    with pytest.raises(ValueError, match="do not belong together: verifier_sha") as error:
        evaluate.replay_sets(config(run=str(run.path), cache=str(cache.path)))
    assert cache.manifest.verifier.weights_sha in str(error.value)
    assert tiny.greedy.manifest.verifier.weights_sha in str(error.value)


def test_verifier_of_another_run_is_refused(run):
    with pytest.raises(ValueError, match="verifier tiny-llama do not belong together"):
        evaluate.draft_for_verifier(run, tiny_verifier(hidden_size=48, seed=5), "float32")


def test_truncated_run_folders_are_named(tiny, run, tmp_path):
    weights = run.checkpoint("best") / "draft.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"draft\.safetensors is damaged"):
        evaluate.replay_sets(config(run=str(run.path), cache=str(tiny.greedy.path)))
    (run.checkpoints / "best" / "draft.json").unlink()
    with pytest.raises(ValueError, match="no complete 'best' checkpoint"):
        evaluate.replay_sets(config(run=str(run.path), cache=str(tiny.greedy.path)))
    (run.path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        evaluate.open_runs(config(run=str(run.path)))
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        evaluate.open_runs(config(run=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "training"}, "no documents of split training"),
        ({"domain": "law"}, "domain law"),
        ({"temperature": 0.3}, "temperature 0.3; it has splits"),
        ({"num_proposals": 9}, "num_proposals is 9; this draft was trained for 1 to 4"),
        ({"draft_sampling": "sampled"}, "needs temperature > 0"),
        ({"run": None}, "no run given"),
        ({"prompts": "gsm8k.jsonl"}, "mode=replay reads answers from a cache, not prompts"),
        ({"compare": ["a"]}, r"compare is \['a'\]; expected two run folders"),
    ],
)
def test_mistakes_are_named_before_any_work(tiny, run, changes, message):
    values = {"run": str(run.path), "cache": str(tiny.greedy.path), **changes}
    with pytest.raises(ValueError, match=message):
        evaluate.replay_sets(config(**values))


def test_command_line_ends_in_one_line_and_status_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.evaluate", f"run={tmp_path}/none", "mode=replay"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {tmp_path}/none is not a run folder")
    assert "Traceback" not in done.stderr


# ---- tables by hand


def hand_made() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two prompts of one domain, N = 2: rounds keep 2, 0 and 1 drafts."""
    origin = {"run_id": "r", "dataset": "d", "mode": "decode", "temperature": 0.0, "draft_sampling": "greedy"}
    rounds = pd.DataFrame(
        {
            "domain": ["math"] * 3,
            "prompt_id": ["p", "p", "q"],
            "doc_id": ["p", "p", "q"],
            "anchor": [10, 13, 40],
            "visit": 1.0,
            "accepted": [2.0, 0.0, 1.0],
        }
    ).assign(**origin)
    slots = pd.DataFrame(
        {
            "domain": ["math"] * 5,
            "prompt_id": ["p", "p", "p", "q", "q"],
            "doc_id": ["p", "p", "p", "q", "q"],
            "anchor": [10, 10, 13, 40, 40],
            "position": [1, 2, 1, 1, 2],
            "reached": 1.0,
            "accepted": [1.0, 1.0, 0.0, 1.0, 0.0],
        }
    ).assign(**origin)
    return slots, rounds


def test_tables_by_hand():
    totals = tables.prompt_totals(*hand_made())
    options = {"draws": 50, "level": 0.9, "seed": 0}
    row = tables.acceptance_table(totals, **options).iloc[0]
    assert row["tau"] == pytest.approx(2.0)
    assert (row["conditional_1"], row["conditional_2"]) == pytest.approx((2 / 3, 1 / 2))
    assert (row["prompts"], row["rounds"]) == (2, 3)
    positions = tables.position_table(totals, **options).set_index("position")
    assert positions["reached"].tolist()[:2] == pytest.approx([3, 2])
    assert positions["survival"].tolist()[:2] == pytest.approx([2 / 3, 1 / 3])
    # One round lost both tokens at position 1, one lost one token at position 2; nothing else is missing.
    assert positions["lost"].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert positions["lost"].sum() == pytest.approx(2 - row["accepted"])
    depth = tables.depth_table(*hand_made(), edges=[0, 2], **options).set_index("depth")
    assert depth["tau"].to_dict() == pytest.approx({0: 2.5, 2: 1.0})


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """120 experiments of 40 prompts whose rounds keep Binomial drafts: the 90 % interval holds the true tau in 90 % of them."""
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(120):
        skill = rng.beta(4, 3, size=40)
        rounds = rng.integers(5, 20, size=40)
        frame = pd.DataFrame(
            {
                "run_id": "r", "dataset": "d", "mode": "decode", "temperature": 0.0, "draft_sampling": "greedy",
                "domain": "math", "prompt_id": [str(i) for i in range(40)], "documents": 1,
                "rounds": rounds.astype(float), "accepted": rng.binomial(4 * rounds, skill).astype(float),
                "reached_1": 1.0, "accepted_1": 1.0,
            }
        )  # fmt: skip
        row = tables.acceptance_table(frame, draws=200, level=0.9, seed=1).iloc[0]
        hits += row["tau_low"] <= 1 + 4 * 4 / 7 <= row["tau_high"]
    assert 0.82 <= hits / 120 <= 0.97


def test_one_prompt_has_no_interval_and_unshared_prompts_cannot_be_paired():
    slots, rounds = hand_made()
    one = tables.prompt_totals(slots[slots["prompt_id"] == "p"], rounds[rounds["prompt_id"] == "p"])
    row = tables.acceptance_table(one, draws=20, level=0.9, seed=0).iloc[0]
    assert np.isnan(row["tau_low"])
    assert np.isnan(row["tau_high"])
    with pytest.raises(ValueError, match="share no prompt"):
        tables.paired_table(
            pd.concat([one, one.assign(run_id="s", prompt_id="other")]), "r", "s", draws=20, level=0.9, seed=0
        )


def test_position_that_no_round_reaches_is_missing_not_zero():
    slots, rounds = hand_made()
    slots = slots.assign(reached=slots["reached"].where(slots["position"] == 1, 0.0), accepted=0.0)
    row = tables.acceptance_table(tables.prompt_totals(slots, rounds), draws=20, level=0.9, seed=0).iloc[0]
    assert np.isnan(row["conditional_2"])
    assert tables.markdown(pd.DataFrame([{"a": float("nan"), "b": 1.0}])).splitlines()[-1] == "|  | 1.000 |"


def test_bf16_head_of_a_checkpoint_is_used_in_fp32(tiny, run):
    """Training on bf16 hardware stores bf16 head rows; evaluation computes in fp32 whatever was stored."""
    draft = new_draft(tiny.greedy)
    draft.load_state_dict(tiny.draft.state_dict())
    draft.lm_head = draft.lm_head.bfloat16()
    facts = {k: v for k, v in vars(draft.contract).items() if v is not None}
    save_draft(draft, run.checkpoints / "best", tiny.greedy.contract().merged(**facts), {})
    loaded, _ = evaluate.draft_for_cache(run, tiny.greedy, "cpu")
    assert {p.dtype for p in loaded.state_dict().values()} == {
        tiny.draft.fc.weight.dtype,
        loaded.kept_ids.dtype,
    }
    assert replace(loaded.config) == tiny.draft.config
