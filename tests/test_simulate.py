"""The concurrency simulation: it walks the rounds it is given, obeys its cost table, and may say that nothing pays."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize

from dspark import simulation as sim
from dspark.calibration import Calibration, Scaling, SignalMap, p_prefix_survives, rounds_of
from dspark.costs import CostTable
from experiments.bench_steps import arguments as bench_arguments
from experiments.bench_steps import run as bench_run
from experiments.simulate import benchmark, scores_of, simulate
from tests.slot_tables import calibrated_run, made_up_run, synthetic_slots

NAN = float("nan")


def costs(per_token: float = 0.0, floor: float = 10.0, draft: float = 1.0, name: str = "line") -> CostTable:
    tokens = np.array([1, 4096])
    return CostTable(
        name=name,
        kind="typed",
        interpolation="linear",
        tokens=tokens,
        verify_ms=floor + per_token * tokens,
        draft_requests=np.array([1, 512]),
        draft_ms=np.array([draft, draft]),
        provenance={},
    )


HINGE = CostTable(
    name="hinge",
    kind="typed",
    interpolation="linear",
    tokens=np.array([1, 64, 4096]),
    verify_ms=np.array([10.0, 10.0, 10.0 + 0.1 * 4032]),
    draft_requests=np.array([1, 512]),
    draft_ms=np.array([1.0, 3.0]),
    provenance={},
)


@pytest.fixture(scope="module")
def slots() -> pd.DataFrame:
    return synthetic_slots(split="test", prompts=12, tokens=60, num_proposals=4, seed=3)


@pytest.fixture(scope="module")
def walk_and_scores(slots):
    rounds = rounds_of(slots)
    walk, order = sim.walk_of(rounds)
    conditional = {"alpha": np.nan_to_num(rounds.take(order).values["alpha"])}
    return walk, conditional, {k: p_prefix_survives(v) for k, v in conditional.items()}


def rows(
    walk_and_scores, policies, *, table=HINGE, mix="all", requests=8, replicas=64, steps=60, **kw
) -> pd.DataFrame:
    walk, conditional, prefix = walk_and_scores
    options = {"servers": 1, "warmup": 20, "resample": False, "seed": 0} | kw
    frame = sim.compare(
        walk,
        policies,
        conditional,
        prefix_scores=prefix,
        costs=table,
        mix=mix,
        requests=requests,
        replicas=replicas,
        steps=steps,
        **options,
    )
    return frame.set_index("policy")


def policy(kind: str, setting: float = NAN) -> sim.Policy:
    return sim.Policy(kind, "alpha" if kind.startswith("scheduler") or kind == "threshold" else "-", setting)


def test_every_round_leads_to_the_next_anchor_that_the_table_has(slots):
    thinned = slots[slots["anchor"] % 5 != 2]
    walk, order = sim.walk_of(rounds_of(thinned))
    frame = rounds_of(thinned).take(order).frame
    anchors = {doc: np.sort(g["anchor"].to_numpy()) for doc, g in frame.groupby("doc_id")}
    for i in range(0, len(frame), 7):
        doc, anchor = frame.loc[i, "doc_id"], frame.loc[i, "anchor"]
        for m in range(walk.num_proposals + 1):
            later = anchors[doc][anchors[doc] >= anchor + m + 1]
            target = walk.next_round[i, m]
            if len(later):
                assert (frame.loc[target, "doc_id"], frame.loc[target, "anchor"]) == (doc, later[0])
            else:
                assert target == -1


def test_full_length_walks_reproduce_the_replayed_tau(slots, walk_and_scores):
    emitted = 3 * 12 * 59  # every response token after the first anchor
    replayed = emitted / slots.loc[slots["position"] == 1, "reached"].sum()
    out = rows(walk_and_scores, [policy("fixed", 4.0)], replicas=256, steps=120)
    assert out.loc["fixed", "tau"] == pytest.approx(replayed, rel=0.02)


def test_constant_acceptance_gives_the_geometric_tau():
    tokens, width, a = 4000, 4, 0.7
    keep = np.full((tokens, width), a, dtype=np.float32)
    row = np.arange(tokens)
    landing = row[:, None] + 1 + np.arange(width + 1)
    walk = sim.Walk(
        kept=np.cumprod(keep, axis=1),
        available=np.full(tokens, width, dtype=np.int32),
        remaining=np.full(tokens, 10**6, dtype=np.int32),
        next_round=np.where(landing < tokens, landing, -1).astype(np.int32),
        first=np.array([0]),
        prompt=np.array(["p"]),
        domain=np.array(["math"]),
        document=np.zeros(tokens, dtype=np.int64),
        visit=np.ones(tokens),
    )
    out = rows((walk, {}, {}), [policy("fixed", 3.0)], requests=64, replicas=16, steps=200)
    assert out.loc["fixed", "tau"] == pytest.approx(sum(a**i for i in range(4)), rel=0.01)
    assert out.loc["fixed", "wasted_drafts"] == pytest.approx(3 - (a + a**2 + a**3), rel=0.02)


def test_plain_decoding_emits_one_token_a_step_at_the_tables_price(walk_and_scores):
    out = rows(walk_and_scores, [policy("none")], requests=128, replicas=16, steps=20)
    assert out.loc["none", "tau"] == 1.0
    assert out.loc["none", "step_ms"] == pytest.approx(float(HINGE.verify_ms_at(np.array(128))))
    assert out.loc["none", "speed_up"] == pytest.approx(1.0)
    assert out.loc["none", "tokens_per_second_per_user"] * 128 == pytest.approx(out.loc["none", "throughput"])


def test_step_time_is_draft_plus_verify_of_the_tokens_taken(walk_and_scores):
    out = rows(walk_and_scores, [policy("fixed", 2.0)], table=costs(per_token=0.5), requests=16)
    tokens = 16 * (1 + out.loc["fixed", "verified_drafts"])
    assert out.loc["fixed", "step_ms"] == pytest.approx(1 + 10 + 0.5 * tokens, rel=1e-6)


@pytest.mark.parametrize("requests", [1, 16, 128])
def test_the_oracle_wastes_nothing_and_bounds_every_policy(walk_and_scores, requests):
    kinds = [
        policy("none"),
        policy("fixed", 2.0),
        policy("fixed", 4.0),
        policy("scheduler"),
        policy("oracle"),
    ]
    out = rows(walk_and_scores, kinds, requests=requests, replicas=max(16, 1024 // requests))
    assert out.loc["oracle", "wasted_drafts"] == 0
    assert out.loc["oracle", "throughput"] >= 0.995 * out["throughput"].max()


@pytest.mark.parametrize("requests", [1, 8, 32, 128])
def test_the_scheduler_is_no_worse_than_any_static_policy_on_a_convex_curve(walk_and_scores, requests):
    static = [policy("fixed", float(n)) for n in range(1, 5)]  # not "none": that one saves the draft as well
    static += [policy("threshold", t) for t in (0.3, 0.5, 0.7)]
    out = rows(
        walk_and_scores, [*static, policy("scheduler")], requests=requests, replicas=max(16, 2048 // requests)
    )
    assert out.loc["scheduler", "gain"] > -0.01


def test_a_stale_number_costs_little(walk_and_scores):
    out = rows(
        walk_and_scores, [policy("scheduler"), policy("scheduler_async")], requests=64, replicas=16, steps=100
    )
    ratio = out.loc["scheduler_async", "throughput"] / out.loc["scheduler", "throughput"]
    assert 0.95 < ratio < 1.01


def test_the_early_stop_can_lose_on_a_jagged_curve(walk_and_scores):
    # A step of cost at 24 tokens that the next 40 tokens pay back: greedy search stops before it, global search does not.
    jagged = CostTable(
        **{
            **vars(HINGE),
            "interpolation": "step",
            "tokens": np.array([24, 64, 4096]),
            "verify_ms": np.array([10.0, 12.0, 500.0]),
        }
    )
    kinds = [policy("scheduler"), policy("scheduler_global")]
    out = rows(walk_and_scores, kinds, table=jagged, requests=16)
    assert out.loc["scheduler_global", "throughput"] > 1.02 * out.loc["scheduler", "throughput"]


def test_dear_tokens_make_the_scheduler_stop_drafting(walk_and_scores):
    full = CostTable(
        **{**vars(HINGE), "tokens": np.array([1, 16, 4096]), "verify_ms": np.array([10.0, 10.0, 50_000.0])}
    )
    out = rows(walk_and_scores, [policy("scheduler"), policy("none")], table=full, requests=16)
    assert out.loc["scheduler", "verified_drafts"] == 0
    assert out.loc["scheduler", "speed_up"] < 1  # it still pays for the draft it does not use


def test_mixes_differ_and_unknown_ones_are_refused(walk_and_scores):
    tau = {
        m: rows(walk_and_scores, [policy("fixed", 4.0)], mix=m).loc["fixed", "tau"]
        for m in ("math", "chat", "all")
    }
    assert tau["chat"] < tau["all"] < tau["math"]
    with pytest.raises(
        ValueError, match=r"'poetry' has no documents; the table has \['chat', 'code', 'math'\]"
    ):
        rows(walk_and_scores, [policy("none")], mix="poetry")


def test_intervals_come_from_prompts_when_they_are_resampled(walk_and_scores):
    lanes = {"requests": 4, "replicas": 24, "servers": 32, "steps": 60}
    width = {}
    for resample in (False, True):
        table = rows(walk_and_scores, [policy("fixed", 4.0)], resample=resample, **lanes)
        width[resample] = (table["high"] - table["low"]).iloc[0]
    assert width[True] > 2 * width[False]


def test_servers_of_a_replica_share_its_prompts_and_add_up(walk_and_scores):
    walk = walk_and_scores[0]
    lanes = sim.lanes_of(
        walk, mix="all", requests=3, replicas=5, servers=7, resample=True, rng=np.random.default_rng(0)
    )
    assert lanes.starts.shape == (35, 3)
    prompts = [
        set(walk.prompt[np.searchsorted(walk.first, group.ravel())])
        for group in lanes.arrivals.reshape(5, 7, -1)
    ]
    assert all(len(p) < 36 for p in prompts)  # a bootstrap sample leaves prompts out
    assert len({frozenset(p) for p in prompts}) == 5
    out = rows(walk_and_scores, [policy("none")], requests=3, replicas=5, servers=7, steps=11)
    assert out.loc["none", "rounds"] == 3 * 5 * 7 * 11
    assert out.loc["none", "step_ms"] == pytest.approx(10.0)


def test_equal_seeds_give_equal_tables(walk_and_scores):
    pair = [rows(walk_and_scores, [policy("scheduler"), policy("fixed", 2.0)], steps=10) for _ in range(2)]
    pd.testing.assert_frame_equal(*pair)


def test_decoded_tables_and_unknown_policies_are_refused(walk_and_scores):
    with pytest.raises(ValueError, match="mode=replay"):
        sim.walk_of(rounds_of(synthetic_slots(split="test", prompts=2, mode="decode")))
    with pytest.raises(ValueError, match="'greedy' is unknown"):
        sim.Policy("greedy", "-", 0.0)
    with pytest.raises(ValueError, match=r"wants confidences 'raw'; this table offers \['alpha'\]"):
        rows(walk_and_scores, [sim.Policy("scheduler", "raw", NAN)])


def test_break_even_acceptance_solves_the_geometric_sum():
    assert sim.break_even_acceptance(1 + 0.5 + 0.25, 2) == pytest.approx(0.5)
    assert sim.break_even_acceptance(0.9, 3) == 0.0
    assert np.isnan(sim.break_even_acceptance(3.5, 2))


def test_break_even_may_answer_no_speed_up(walk_and_scores):
    walk = walk_and_scores[0]
    cheap, dear = (sim.break_even(walk, t, mix="all", requests=8) for t in (costs(), costs(per_token=20.0)))
    assert cheap.loc[cheap["best"], "drafts"].tolist() == [4]
    assert dear.loc[dear["best"], "drafts"].tolist() == [0]
    assert (dear.loc[dear["drafts"] > 0, "speed_up"] < 1).all()
    assert cheap["tau"].is_monotonic_increasing
    assert cheap.loc[2, "cost_ratio"] == pytest.approx(11 / 10)


def test_threshold_zero_keeps_everything_and_higher_ones_keep_less_of_better_drafts(slots):
    rounds = rounds_of(slots)
    table = sim.threshold_sweep(rounds, rounds.values["alpha"], [0.0, 0.3, 0.6, 0.9])
    for _, part in table.groupby("domain"):
        assert (np.diff(part["verified"]) < 0).all()
        assert (np.diff(part["acceptance_rate"]) > 0).all()
    first = table[(table["threshold"] == 0) & (table["domain"] == "all")].iloc[0]
    assert first["accepted"] == pytest.approx(slots["accepted"].sum() / first["rounds"])


# The commands


def composed(*overrides: str):
    small = ["lanes=64", "replicas=4", "steps=8", "warmup=2", "concurrency=[1,16]", "thresholds=[0.5]"]
    with initialize(version_base="1.3", config_path="../configs"):
        return compose("simulate", overrides=[*small, *overrides])


def test_the_command_writes_every_policy_concurrency_and_mix(tmp_path, capsys):
    out = simulate(
        composed(
            f"run={calibrated_run()}",
            f"out={tmp_path}",
            "costs=jagged_synthetic",
            "mixes=[all,chat]",
            "draft_ms=2",
        )
    )
    table = pd.read_parquet(out / "simulation.parquet")
    per_cell = table.groupby(["mix", "concurrency"])
    assert len(per_cell) == 4
    # none, oracle, 2 fixed, 1 threshold, scheduler x (raw, calibrated, alpha, 3 free signals), asynchronous, global
    assert per_cell.size().tolist() == [13] * 4
    assert set(table.loc[table["policy"] == "scheduler", "source"]) == {
        "alpha", "raw", "calibrated", "max_prob", "entropy", "margin",
    }  # fmt: skip
    assert np.isfinite(table[["throughput", "low", "high", "gain", "speed_up"]]).all().all()
    assert (
        pd.read_parquet(out / "break_even.parquet").groupby(["mix", "concurrency"])["best"].sum().eq(1).all()
    )
    assert json.loads((out / "manifest.json").read_text())["cost"]["draft_ms_at_1"] == 2.0
    assert "best block length by concurrency" in capsys.readouterr().out


def test_a_calibration_by_domain_scales_each_round_by_its_own_domain():
    rounds = rounds_of(synthetic_slots(split="test", prompts=2, num_proposals=2))
    constant = {"math": -1.0, "code": 0.0, "chat": 1.0}  # scale 0: a domain's every draft has the same chance
    scalings = {d: Scaling(scales=(0.0, 0.0), shifts=(t, t)) for d, t in constant.items()}
    calibration = Calibration(
        run_id="synthetic", method="affine", scalings=scalings, scale=1.0, shift=0.0, fit={}, report={},
        signals={"entropy": SignalMap(slope=1.0, intercepts=(0.0, 0.0), scalings=scalings)},
    )  # fmt: skip
    conditional, prefix = scores_of(rounds, calibration, sampled=False, free_signals=True)
    shift = rounds.frame["domain"].map(constant).to_numpy()[:, None]
    expected = np.where(rounds.present, 1 / (1 + np.exp(-shift)), 0.0)
    for source in ("calibrated", "entropy"):
        np.testing.assert_allclose(conditional[source], expected)
        np.testing.assert_allclose(prefix[source], np.cumprod(expected, axis=1))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["costs=tpu"], r"cost table 'tpu' is unknown; expected a path or one of \["),
        (["set=validation"], "was fitted on 'validation'"),
        (["set=train"], r"no evaluated set 'train'; it has \['test', 'validation'\]"),
        (["calibration=nowhere.json"], r"no calibration at nowhere\.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        simulate(composed(f"run={calibrated_run()}", *overrides))


def test_the_command_needs_a_run():
    with pytest.raises(ValueError, match="no run was given"):
        simulate(composed())


def test_a_run_without_a_head_still_gets_its_static_policies(tmp_path):
    table = synthetic_slots(split="test", prompts=2, tokens=30, num_proposals=2).assign(confidence=np.nan)
    out = simulate(composed(f"run={made_up_run(tmp_path / 'blind', {'test': table})}", "smooth=true"))
    frame = pd.read_parquet(out / "simulation.parquet")
    assert set(frame.loc[frame["policy"] == "scheduler", "source"]) == {"alpha"}
    assert "threshold" not in set(frame["policy"])


def test_greedy_drafts_have_no_perfect_head_in_the_table(tmp_path):
    table = synthetic_slots(split="smollm2-test", prompts=2, tokens=30, num_proposals=2)
    table = table.assign(confidence=np.nan, draft_sampling="greedy")
    out = simulate(composed(f"run={made_up_run(tmp_path / 'blind', {'smollm2-test': table})}", "set=test"))
    assert set(pd.read_parquet(out / "simulation.parquet")["policy"]) == {"none", "fixed", "oracle"}
    assert json.loads((out / "manifest.json").read_text())["set"] == "smollm2-test"


def test_the_benchmark_says_how_fast_it_is(capsys):
    measured = benchmark(composed("benchmark=true", "benchmark_rounds=300"))
    assert measured["rounds_per_second"] > 100_000
    assert "300 steps x 256 requests" in capsys.readouterr().out


def test_bench_steps_writes_a_table_that_costs_can_read(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    out = tmp_path / "mine.json"
    flags = [
        "--model-path",
        str(tmp_path / "tiny"),
        "--out",
        str(out),
        "--tokens",
        "1",
        "3",
        "9",
        "16",
        "--context",
        "8",
    ]
    bench_run(bench_arguments([*flags, "--requests", "4", "--repeats", "3"]))
    table = CostTable.read(out)
    assert table.name == "mine"
    assert table.tokens.tolist() == [1, 3, 8, 16]  # 9 tokens do not divide over 4 requests
    assert table.provenance["context"] == 8
    assert "ms for 1 token" in capsys.readouterr().out


def test_bench_steps_refuses_a_missing_device_and_a_wrong_dtype(capsys):
    from experiments.bench_steps import main

    assert main(["--dtype", "int4"]) == 1
    assert "expected one of ['bfloat16', 'float16', 'float32']" in capsys.readouterr().err


def test_the_timed_forward_equals_the_uncached_one():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from experiments.bench_steps import _step

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.detach()))
    with torch.no_grad():
        step = _step(model, rows=2, columns=3, context=5)
        for _ in range(2):  # the second call only agrees if the cache was cropped back
            step()
        ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
        whole = model(input_ids=ids).logits[:, 5:]
    for timed in seen[1:3]:
        torch.testing.assert_close(timed, whole, rtol=1e-4, atol=1e-5)
