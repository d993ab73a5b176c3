"""What leaves the repository: names, shapes, dtypes, bytes and config.json of exports, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from dspark.card import tau_interval
from dspark.config import DraftConfig
from dspark.data.features import Manifest
from dspark.export import ENGINES, engine_line, engine_support, inventory, served_config
from dspark.runs import Run, load_draft, save_draft
from dspark.verifier import VerifierInfo
from experiments.build import build_draft_config, build_loss, check_keys
from experiments.cli import CONFIGS
from experiments.export import export
from tests.builders import draft_config
from tests.serving_artefacts import draft_for, verifier_of_tests, write_cache, write_run

torch.set_num_threads(1)

KIMI = DraftConfig(
    hidden_size=7168,
    intermediate_size=18432,
    num_layers=3,
    num_heads=56,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    max_position_embeddings=262_144,
    vocab_size=163_840,
    draft_vocab_size=32_000,
    block_size=8,
    sample_from_anchor=False,
    mask_token_id=163_608,
    aux_layer_ids=(1, 29, 57),
    num_verifier_layers=61,
    layer_types=("full_attention",) * 3,
    sliding_window=None,
    head="vanilla",
    markov_rank=256,
    confidence=True,
    confidence_uses_prev_embedding=True,
    logit_scale=1.0,
)


def settings(command: str, *overrides: str):
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose(command, overrides=list(overrides))


def run_export(run: Run, out: Path, *overrides: str):
    return export(settings("export", f"run={run.path}", f"out={out}", *overrides))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("cache") / "tiny", verifier_of_tests())


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs"), cache, draft_for(cache))


# ---- the published geometry


def test_kimi_geometry_has_the_published_inventory():
    found = inventory(KIMI, embed_tokens=True)
    assert len(found) == 44
    assert sum(spec.bytes for spec in found.values()) == 6_299_478_018
    H, F, W, V, R = 7168, 18432, 163_840, 32_000, 256
    expected = {
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "markov_head.markov_w1.weight": (W, R),
        "markov_head.markov_w2.weight": (V, R),
        "confidence_head.proj.weight": (1, H + R),
        "confidence_head.proj.bias": (1,),
        "lm_head.weight": (V, H),
        "embed_tokens.weight": (W, H),
        "d2t": (V,),
        "t2d": (W,),
    }
    for i in range(3):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_proj.weight": (56 * 128, H),
            f"layers.{i}.self_attn.k_proj.weight": (8 * 128, H),
            f"layers.{i}.self_attn.v_proj.weight": (8 * 128, H),
            f"layers.{i}.self_attn.o_proj.weight": (H, 56 * 128),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (F, H),
            f"layers.{i}.mlp.up_proj.weight": (F, H),
            f"layers.{i}.mlp.down_proj.weight": (H, F),
        }
    assert {name: spec.shape for name, spec in found.items()} == expected
    dtypes = {name: spec.dtype for name, spec in found.items()}
    assert dtypes.pop("d2t") == torch.int64
    assert dtypes.pop("t2d") == torch.bool
    assert set(dtypes.values()) == {torch.bfloat16}


def test_kimi_experiment_composes_to_the_published_geometry_and_recipe():
    cfg = settings(
        "train",
        "experiment=kimi_k27_code",
        "verifier.path=x",
        "data.path=x",
        "data.responses_by=x",
        "data.temperature=0",
    )
    check_keys(cfg)
    verifier = VerifierInfo(
        name="kimi",
        path="x",
        revision=None,
        architecture="KimiK25ForConditionalGeneration",
        weights_sha="0",
        hidden_size=7168,
        num_layers=61,
        num_heads=64,
        num_kv_heads=64,
        head_dim=192,
        intermediate_size=18432,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        max_position_embeddings=262_144,
        vocab_size=163_840,
        tokenizer_size=163_840,
        tied=False,
        logit_scale=1.0,
        compute_dtype="bfloat16",
        tokenizer_sha="0",
        chat_template_sha="0",
        bos_token_id=None,
        eos_token_ids=(1,),
        pad_token_id=None,
    )
    manifest = Manifest(
        verifier=verifier,
        aux_layer_ids=tuple(cfg.verifier.aux_layer_ids),
        mask_token_id=cfg.verifier.mask_token_id,
        last="pre_norm",
        dataset="x",
        responses_by="x",
        generation={},
        capture={},
        command="",
    )
    config = build_draft_config(cfg, manifest, cfg.draft.vocab_size)
    assert config == KIMI
    assert config.num_proposals == 7
    assert cfg.optimizer.lr == 3e-4
    assert cfg.optimizer.warmup_steps == 300
    assert (cfg.trainer.max_steps, cfg.trainer.seq_length, cfg.trainer.anchors) == (20_000, 20_000, 3072)
    assert cfg.trainer.accumulate == 2
    assert cfg.trainer.rows_per_batch * cfg.trainer.accumulate * cfg.trainer.devices == 8
    loss = build_loss(cfg)
    assert {k: v for k, v in loss.terms.items() if v} == {"ce": 0.1, "tv": 0.9}
    assert loss.decay_gamma == 4.0


def test_kimi_geometry_without_embeddings_is_43_tensors():
    found = inventory(KIMI, embed_tokens=False)
    assert len(found) == 43
    assert sum(spec.bytes for spec in found.values()) == 3_950_667_778
    assert "embed_tokens.weight" not in found


def test_full_vocabulary_ships_neither_head_nor_map_unless_frozen_rows_travel():
    config = draft_config(draft_vocab_size=97)
    bare, whole = inventory(config, embed_tokens=False), inventory(config, embed_tokens=True)
    assert not {"d2t", "t2d"} & (set(bare) | set(whole))
    assert "lm_head.weight" not in bare
    assert whole["lm_head.weight"].shape == whole["embed_tokens.weight"].shape == (97, 32)


# ---- config.json


@pytest.mark.parametrize("anchor_first", [True, False])
def test_layout_flag_and_proposals_are_explicit_and_agree(cache, tmp_path, anchor_first):
    run = write_run(tmp_path / "runs", cache, draft_for(cache, sample_from_anchor=anchor_first, block_size=5))
    run_export(run, tmp_path / "spec")
    run_export(run, tmp_path / "dense", "layout=dense")
    nested, flat = config_of(tmp_path / "spec"), config_of(tmp_path / "dense")
    proposals = nested["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert proposals == (5 if anchor_first else 4)
    assert nested["sample_from_anchor"] is flat["sample_from_anchor"] is anchor_first
    assert flat["dspark_bonus_anchor"] is (not anchor_first)
    assert nested["block_size"] == flat["block_size"] == 5


def test_taps_are_one_less_in_the_dense_layout(run, tmp_path):
    run_export(run, tmp_path / "spec")
    run_export(run, tmp_path / "dense", "layout=dense")
    assert config_of(tmp_path / "spec")["aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config_of(tmp_path / "dense")["target_layer_ids"] == [0, 2, 3]


def test_rope_in_both_forms_gives_the_same_frequencies(run, tmp_path):
    """Rebuilt by Transformers' own rotary module from either form of the exported configuration."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

    run_export(run, tmp_path / "out")
    decoder = config_of(tmp_path / "out")["transformer_layer_config"]
    new = {k: v for k, v in decoder.items() if k != "rope_theta"}
    legacy = {k: v for k, v in decoder.items() if k != "rope_parameters"}
    frequencies = [Qwen3RotaryEmbedding(Qwen3Config(**c)).inv_freq for c in (decoder, new, legacy)]
    head_dim = decoder["head_dim"]
    own = [10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    for table in frequencies:
        torch.testing.assert_close(table, torch.tensor(own), rtol=1e-6, atol=0)


def test_top_level_has_no_model_type_in_the_speculators_layout(run, tmp_path):
    run_export(run, tmp_path / "out")
    assert "model_type" not in config_of(tmp_path / "out")


def test_window_and_layer_types_survive(cache, tmp_path):
    kinds = ("sliding_attention", "full_attention")
    run = write_run(tmp_path / "runs", cache, draft_for(cache, layer_types=kinds, sliding_window=9))
    run_export(run, tmp_path / "out")
    decoder = config_of(tmp_path / "out")["transformer_layer_config"]
    assert decoder["layer_types"] == list(kinds)
    assert decoder["sliding_window"] == 9


def test_compatibility_key_is_written_only_where_old_engines_need_it(cache, run, tmp_path):
    run_export(run, tmp_path / "two")  # 2 layers, 3 taps
    decoder = config_of(tmp_path / "two")["transformer_layer_config"]
    assert decoder["dflash_config"] == {"target_layer_ids": [0, 2, 3], "mask_token_id": 6}
    three = write_run(tmp_path / "runs", cache, draft_for(cache, num_layers=3))
    run_export(three, tmp_path / "three")
    assert "dflash_config" not in config_of(tmp_path / "three")["transformer_layer_config"]


def test_logit_scale_is_stated_when_it_is_not_one(run):
    _, _, facts = load_draft(run.checkpoint("best"), attention_backend="grouped")
    from dspark.export import Origin

    scaled = served_config(
        draft_config(logit_scale=0.25),
        Origin(verifier_name="v"),
        layout="speculators",
        num_speculative_tokens=3,
        dtype=torch.bfloat16,
    )
    assert scaled["transformer_layer_config"]["logit_scale"] == 0.25
    assert facts["step"] == 7


# ---- engines


@pytest.mark.parametrize(
    ("layout", "anchor_first", "wrong"),
    [
        ("speculators", True, {"0.26.0"}),
        ("speculators", False, set()),
        ("dense", True, set()),
        ("dense", False, set()),
    ],
)
def test_engine_table_follows_the_serving_contract(layout, anchor_first, wrong):
    support = engine_support(draft_config(sample_from_anchor=anchor_first), layout)
    assert [e.version for e in support] == list(ENGINES)
    assert {e.version for e in support if not e.correct} == wrong


def test_engine_line_names_the_version_that_cannot_and_why():
    line = engine_line(engine_support(draft_config(sample_from_anchor=True), "speculators"))
    assert "decoded correctly by vLLM 0.27.0" in line
    assert "not by 0.26.0 (reads every anchor-first draft of this layout as fill-in" in line


# ---- complete or refused


def test_export_holds_the_run_s_weights_in_bf16(cache, run, tmp_path):
    report = run_export(run, tmp_path / "out")
    served = load_file(tmp_path / "out" / "model.safetensors")
    draft, _, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    state = draft.state_dict()
    for name, tensor in served.items():
        if name in state:
            assert torch.equal(tensor.float(), state[name].float()), name
    kept = draft.kept_ids
    assert torch.equal(served["d2t"] + torch.arange(len(kept)), kept)
    assert torch.equal(served["t2d"].nonzero().squeeze(-1), kept)
    assert torch.equal(served["lm_head.weight"], cache.verifier_weights()["lm_head.weight"][kept])
    assert torch.equal(served["embed_tokens.weight"], cache.verifier_weights()["embed_tokens.weight"])
    assert report.tensors == len(served)
    assert report.bytes == sum(t.numel() * t.element_size() for t in served.values())


def test_without_embed_tokens_only_the_embedding_is_left_out(run, tmp_path):
    run_export(run, tmp_path / "with")
    run_export(run, tmp_path / "without", "embed_tokens=false")
    names = [set(load_file(tmp_path / f / "model.safetensors")) for f in ("with", "without")]
    assert names[0] - names[1] == {"embed_tokens.weight"}


def test_shards_hold_what_one_file_holds(run, tmp_path):
    run_export(run, tmp_path / "one")
    report = run_export(run, tmp_path / "many", "shard_gb=0.00002")
    assert len(report.files) > 2
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == report.bytes
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], whole[name])
    files = [path for folder in ("one", "many") for path in (tmp_path / folder).iterdir()]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)  # whoever serves them


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_that_no_engine_loads_are_refused_unless_asked(cache, tmp_path, head):
    run = write_run(tmp_path / "runs", cache, draft_for(cache, head=head))
    with pytest.raises(ValueError, match=f"no engine has the {head} head.*allow_unservable=true"):
        run_export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = run_export(run, tmp_path / "out", "allow_unservable=true")
    assert not any(e.correct for e in report.engines)
    assert "no engine serves this" in report.notes[0]


@pytest.mark.parametrize(
    ("kinds", "non_causal"), [(("full_attention",) * 2, True), (("sliding_attention",) * 2, False)]
)
def test_rank_zero_is_written_for_method_dflash(cache, tmp_path, kinds, non_causal):
    """vLLM's dflash reads `sliding_window_non_causal: false` as causal in every layer, full ones too."""
    run = write_run(
        tmp_path / "runs",
        cache,
        draft_for(
            cache,
            head="none",
            markov_rank=0,
            confidence_uses_prev_embedding=False,
            layer_types=kinds,
            sliding_window=9,
        ),
    )
    report = run_export(run, tmp_path / "out")
    values = config_of(tmp_path / "out")
    assert report.method == values["speculators_model_type"] == "dflash"
    assert values["sliding_window_non_causal"] is non_causal
    assert not any(
        n.startswith(("markov", "confidence")) for n in load_file(tmp_path / "out/model.safetensors")
    )
    assert "written for method dflash, without the confidence head" in " ".join(report.notes)
    assert '"method": "dflash"' in (tmp_path / "out" / "README.md").read_text()


def test_rank_zero_anchor_first_is_refused_and_written_as_dspark_when_asked(cache, tmp_path):
    draft = draft_for(cache, head="none", markov_rank=0, confidence=False, sample_from_anchor=True)
    run = write_run(tmp_path / "runs", cache, draft)
    with pytest.raises(ValueError, match="anchor-first draft without a sequential head"):
        run_export(run, tmp_path / "out")
    report = run_export(run, tmp_path / "out", "allow_unservable=true")
    assert report.method == config_of(tmp_path / "out")["speculators_model_type"] == "dspark"
    assert config_of(tmp_path / "out")["markov_rank"] == 0


def test_output_folder_that_exists_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists; name another folder"):
        run_export(run, tmp_path / "out")


def test_unfinished_checkpoint_is_refused(cache, tmp_path):
    run = write_run(tmp_path, cache, draft_for(cache))
    (run.checkpoints / "best" / "draft.json").unlink()
    with pytest.raises(ValueError, match="no complete 'best' checkpoint"):
        run_export(run, tmp_path / "out")


def test_more_tokens_than_trained_are_refused(run, tmp_path):
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens is 4.*block_size 4 in the fill-in layout.*1 to 3"
    ):
        run_export(run, tmp_path / "out", "num_speculative_tokens=4")


def test_fewer_tokens_than_trained_are_written_with_a_note(run, tmp_path):
    report = run_export(run, tmp_path / "out", "num_speculative_tokens=2")
    assert config_of(tmp_path / "out")["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert "2 of the 3 trained proposals" in report.notes[0]


def test_another_verifier_s_cache_is_refused_with_both_values(run, tmp_path):
    other = write_cache(tmp_path / "other", verifier_of_tests(seed=1), documents=1)
    with pytest.raises(
        ValueError, match=r"do not belong together: verifier_sha: '\w+' in run tiny-run, '\w+' in cache"
    ):
        run_export(run, tmp_path / "out", f"cache={other.path}")


def test_cache_that_moved_asks_for_the_embedding(cache, tmp_path):
    run = write_run(tmp_path, cache, draft_for(cache))
    manifest = run.manifest
    manifest.data["cache"] = "gone"
    run.write_manifest(manifest)
    with pytest.raises(ValueError, match=r"cache is not where it was.*embed_tokens=false"):
        run_export(run, tmp_path / "out")
    assert run_export(run, tmp_path / "out", "embed_tokens=false").tensors == 32


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", lambda t: t * math.nan, "fc.weight has NaN or infinite values"),
        ("kept_ids", lambda t: t.flip(0), "the vocabulary map or the verifier is another one"),
        ("lm_head", lambda t: t.flip(0), "frozen head rows.*not those of cache"),
    ],
)
def test_damaged_weights_are_refused(cache, tmp_path, name, change, message):
    run = write_run(tmp_path, cache, draft_for(cache))
    file = run.checkpoint("best") / "draft.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        run_export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_behind_when_export_fails(cache, tmp_path):
    run = write_run(tmp_path, cache, draft_for(cache))
    with pytest.raises(ValueError, match="expected one of"):
        run_export(run, tmp_path / "out", "layout=onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-run"]


# ---- what travels along


def test_calibration_and_tokenizer_files_travel_along(cache, tmp_path):
    run = write_run(tmp_path / "runs", cache, draft_for(cache))
    (run.path / "calibration").mkdir()
    (run.path / "calibration" / "calibration.json").write_text('{"temperatures": [1.0]}')
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    run_export(run, tmp_path / "out", f"tokenizer={tmp_path / 'tok'}")
    assert (tmp_path / "out" / "calibration.json").read_text() == '{"temperatures": [1.0]}'
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_card_reports_what_the_run_measured_and_nothing_else(cache, tmp_path):
    run = write_run(tmp_path / "runs", cache, draft_for(cache))
    bare = run_export(run, tmp_path / "bare")
    assert "Not measured in this run" in (bare.folder / "README.md").read_text()
    folder = run.eval_folder("tiny-test")
    folder.mkdir(parents=True)
    rounds = pd.DataFrame(
        {
            "prompt_id": ["a", "a", "b"],
            "visit": [1.0, 1.0, 2.0],
            "accepted": [1.0, 2.0, 0.5],
            "mode": "replay",
            "temperature": 0.0,
        }
    )
    rounds.to_parquet(folder / "rounds.parquet")
    (folder / "summary.json").write_text(json.dumps({"tau": 2.0, "survival": [0.75, 0.25, 0.125]}))
    measured = run_export(run, tmp_path / "measured")
    text = (measured.folder / "README.md").read_text()
    assert "| tiny-test | 2 | replay | 0 | 2.000 (1.500 to 2.500) | 0.750 0.250 0.125 |" in text
    assert "Positions beyond 512 tokens were never trained" in text
    assert "0.1 ce + 0.9 tv" in text
    facts = json.loads((measured.folder / "dspark.json").read_text())
    assert facts["measured"]["tiny-test"]["survival"] == [0.75, 0.25, 0.125]
    assert facts["contract"]["verifier_sha"] == cache.manifest.verifier.weights_sha


def test_tau_interval_resamples_prompts_not_rounds():
    """Two prompts of many equal rounds each: only the two prompt means can vary."""
    rounds = pd.DataFrame(
        {"prompt_id": ["a"] * 50 + ["b"] * 50, "visit": 1.0, "accepted": [1.0] * 50 + [3.0] * 50}
    )
    assert tau_interval(rounds) == (2.0, 4.0)


def test_card_s_command_names_method_and_tokens(run, tmp_path):
    report = run_export(run, tmp_path / "out", "verifier_name=org/model")
    assert (
        f'vllm serve org/model --speculative-config \'{{"model": "{report.folder}", "method": "dspark", '
        '"num_speculative_tokens": 3}\'' in (report.folder / "README.md").read_text()
    )


def test_folded_checkpoint_folder_can_be_exported(cache, tmp_path):
    run = write_run(tmp_path / "runs", cache, draft_for(cache))
    draft, contract, facts = load_draft(run.checkpoint("best"), attention_backend="grouped")
    with torch.no_grad():
        draft.confidence_head.proj.bias.add_(1.0)
    save_draft(draft, run.path / "calibration" / "folded", contract, facts)
    run_export(run, tmp_path / "out", f"checkpoint={run.path / 'calibration' / 'folded'}")
    served = load_file(tmp_path / "out" / "model.safetensors")["confidence_head.proj.bias"]
    assert torch.equal(served, draft.confidence_head.proj.bias.detach().to(torch.bfloat16))
