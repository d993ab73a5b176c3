"""A small draft inside the package, for whoever has trained nothing: `run=pretrained` wherever a run is accepted.

It is stored as a pair: `<stem>.safetensors` with the weights in few bits, `<stem>.json` with all that a run
folder says beside them. Frozen rows (embedding, head) are the verifier's and left out; unpacking takes them from
the verifier and checks a hash. The first use writes an ordinary run folder, `runs/pretrained`, so no other part
of the package knows about packing.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int16, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from dspark.blocks import DraftBatch
from dspark.nn.draft import Draft
from dspark.rounding import BIAS, LARGEST, TABLE, round_draft, round_jointly
from dspark.verifier import default_cache_dir, smollm2_folder

NAME = "pretrained"
FOLDER = Path("runs") / NAME
STEM = Path(__file__).parent / "data" / "embedded" / NAME
CACHE = Path("data") / "cache" / "smollm2"
WIDE = -128  # byte of a code beyond +-127
PACKED_FORMAT = "dspark-packed-2"

# Distance between two stored values, as a share of the root mean square of a line, by the matrix's name. The Markov tables have a
# line a rank, since ranks differ by orders of magnitude; other matrices have a line an output. Rounding one matrix at step s moves
# the draft's distribution by c s^2 nats, c measured for the shipped draft on validation texts (LOG.md, 2026-12-02); at a given number
# of bytes the least is lost where every kind of matrix loses nats in proportion to its entries, s^2 ~ entries / c.
STEPS = {
    "fc": 0.182,
    "self_attn.q_proj": 0.337,
    "self_attn.k_proj": 0.162,
    "self_attn.v_proj": 0.091,
    "self_attn.o_proj": 0.172,
    "mlp.gate_proj": 0.371,
    "mlp.up_proj": 0.34,
    "mlp.down_proj": 0.227,
    "markov_head.markov_w1": 0.327,
    "markov_head.markov_w2": 0.026,
}
STEP = 0.14  # of matrices without one of their own
BY_COLUMN = (TABLE, BIAS)


# ---- few bits


def quantise(lines: Float[Tensor, "R C"], *, step: float) -> tuple[Int16[Tensor, "R C"], Float[Tensor, " R"]]:
    """Integers and their scales (`line_scales`): lines ~ codes * scale, each value within half a scale.

    Nothing is clipped and no number of bits fixed: `squeeze` spends few bits on common codes, and then even steps are close to
    the best. Raises ValueError where a code is no int16.
    """
    scales = line_scales(lines, step=step)
    return _steps(lines, scales.float().unsqueeze(-1)).to(torch.int16), scales


def line_scales(lines: Float[Tensor, "R C"], *, step: float) -> Float[Tensor, " R"]:
    """`step` times the root mean square of each line, fp16. Raises ValueError where a value is beyond all codes."""
    lines = lines.float()
    scales = (step * lines.square().mean(-1).sqrt()).half()
    if bool((_steps(lines.abs().amax(-1), scales.float()) > LARGEST).any()):
        raise ValueError(
            f"a value is more than {LARGEST} steps of {step} root mean squares of its line; take wider steps."
        )
    return scales


def _steps(values: Tensor, scales: Tensor) -> Tensor:
    """The values as whole numbers of steps; a line of zeros has scale 0."""
    return (values.float() / scales.where(scales > 0, torch.inf)).round()


def dequantise(codes: Int16[Tensor, "R C"], scales: Float[Tensor, " R"]) -> Float[Tensor, "R C"]:
    """The fp32 lines that codes and scales stand for."""
    return codes.float() * scales.float().unsqueeze(-1)


def squeeze(codes: Int16[Tensor, "R C"]) -> tuple[UInt8[Tensor, " n"], Int16[Tensor, " w"]]:
    """Codes as a zlib stream of a byte each, and the few that no byte holds, whose byte is `WIDE`, in order.

    The stream is Huffman coding alone, since a search for repetitions makes it longer.
    """
    flat = codes.contiguous().flatten()
    wide = (flat <= WIDE) | (flat >= -WIDE)
    bytes_ = flat.where(~wide, WIDE).to(torch.int8).numpy().tobytes()
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    stream = packer.compress(bytes_) + packer.flush()
    return torch.from_numpy(np.frombuffer(stream, np.uint8).copy()), flat[wide]


def expand(stream: UInt8[Tensor, " n"], wide: Int16[Tensor, " w"], *, rows: int) -> Int16[Tensor, "R C"]:
    """The codes that `squeeze` wrote."""
    codes = torch.from_numpy(
        np.frombuffer(zlib.decompress(stream.numpy().tobytes()), np.int8).astype(np.int16)
    )
    codes[codes == WIDE] = wide
    return codes.reshape(rows, -1)


def step_of(name: str) -> float:
    """The step of the matrix that a checkpoint calls `name`."""
    return STEPS.get(".".join(name.split(".")[-3:-1]), STEP)


def in_lines(name: str, matrix: Tensor) -> Tensor:
    """A matrix with its lines as rows, or, from lines, as it was."""
    return matrix.T if name in BY_COLUMN else matrix


def rounded_codes(draft: Draft, batches: Iterable[DraftBatch]) -> dict[str, Int16[Tensor, "M N"]]:
    """Codes of the matrices whose effect the batches show, rounded jointly (`dspark.rounding`), by checkpoint name.

    The draft is left with the rounded matrices. Scales are those of `quantise`, so `pack` and readers need not know.
    """
    codes: dict[str, Tensor] = {}

    def round_one(name: str, weight: Tensor, moments: Tensor) -> Tensor:
        scales = line_scales(in_lines(name, weight), step=step_of(name))
        scale = scales.float().unsqueeze(0 if name in BY_COLUMN else 1)
        codes[name] = round_jointly(weight, scale, moments)
        return codes[name].float() * scale

    round_draft(draft, batches, round_one)
    return codes


# ---- the pair of files


def pack(
    run: Path,
    stem: Path,
    *,
    origin: Mapping[str, Any],
    measured: Mapping[str, Any],
    codes: Mapping[str, Int16[Tensor, "M N"]] | None = None,
) -> int:
    """Write the best draft of a run folder as `<stem>.safetensors` and `<stem>.json`; returns the bytes of both.

    `origin` is what exports say about the verifier (fields of `dspark.export.Origin`); `measured` is kept as given. `codes` are
    those of `rounded_codes` for this draft; matrices without are rounded entry by entry. Absolute paths in the run's records
    are left out. The same input gives the same bytes.
    Raises ValueError when a weight is not finite in fp16.
    """
    given = codes or {}
    description = json.loads((run / "checkpoints" / "best" / "draft.json").read_text())
    manifest = json.loads((run / "manifest.json").read_text())
    with safe_open(run / "checkpoints" / "best" / "draft.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    head, kept = tensors.pop("lm_head"), tensors.pop("kept_ids")
    marks = np.zeros(description["config"]["vocab_size"], bool)
    marks[kept.numpy()] = True
    packed = {"kept": torch.from_numpy(np.packbits(marks))}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.half()).all()):
            raise ValueError(f"{name} of {run} has values that fp16 cannot hold; it cannot be packed.")
        if tensor.ndim == 2 and len(tensor) > 1:
            lines, step = in_lines(name, tensor), step_of(name)
            if name in given:
                found, scales = in_lines(name, given[name]), line_scales(lines, step=step)
            else:
                found, scales = quantise(lines, step=step)
            packed[f"{name}.scales"] = scales
            packed[f"{name}.codes"], packed[f"{name}.wide"] = squeeze(found)
        else:
            packed[name] = tensor.half()
    data = stem.with_suffix(".safetensors")
    save_file(packed, data, metadata={"format": PACKED_FORMAT})
    data.chmod(0o644)  # safetensors writes for the owner alone; an installed package is everyone's
    manifest["command"] = " ".join(without_paths(manifest["command"].split(" ")))
    manifest["overrides"] = without_paths(manifest["overrides"])
    manifest["data"] = {**manifest["data"], "cache": CACHE.as_posix()}
    facts = {
        "format": PACKED_FORMAT,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "head_sha256": head_sha(head),
        "packing": {
            "step": STEP,
            "steps": STEPS,
            "by_column": BY_COLUMN,
            "vectors": "float16",
            "jointly": sorted(given),
        },
        "measured": dict(measured),
        "draft": {**description, "origin": dict(origin)},
        "manifest": manifest,
        "config_yaml": re.sub(r"(?m)^( *\w+:) /.*$", r"\1 null", (run / "config.yaml").read_text()),
    }
    return _write_facts(stem, facts)


def record(stem: Path, measured: Mapping[str, Any]) -> int:
    """Put `measured` in place of what a pair says was measured; returns the bytes of both files."""
    facts = json.loads(stem.with_suffix(".json").read_text())
    return _write_facts(stem, {**facts, "measured": dict(measured)})


def _write_facts(stem: Path, facts: Mapping[str, Any]) -> int:
    text = json.dumps(facts, indent=1) + "\n"
    stem.with_suffix(".json").write_text(text)
    return stem.with_suffix(".safetensors").stat().st_size + len(text.encode())


def unpack(stem: Path, folder: Path, head: Float[Tensor, "W H"]) -> None:
    """Write the run folder that a packed pair stands for. `head` is the verifier's output head, all rows.

    The folder appears whole or not at all.
    Raises ValueError when the pair is damaged or the head another verifier's, FileExistsError when the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is no complete run; remove it and run again.")
    facts, tensors = read_packed(stem)
    config = facts["draft"]["config"]
    fits = tuple(head.shape) == (config["vocab_size"], config["hidden_size"])
    rows = head[tensors["kept_ids"]].to(torch.bfloat16) if fits else head
    if head_sha(rows) != facts["head_sha256"]:
        raise ValueError(
            f"the packed draft {stem.name} belongs to verifier {facts['manifest']['verifier'].get('name')!r}; "
            f"these head rows {tuple(head.shape)} are not that verifier's. Fetch it with "
            "`python -m experiments.collect`."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".tmp") as temporary:
        target = Path(temporary) / "run"
        best = target / "checkpoints" / "best"
        best.mkdir(parents=True)
        save_file(
            {**tensors, "lm_head": rows.contiguous()},
            best / "draft.safetensors",
            metadata={"format": facts["draft"]["format"]},
        )
        (best / "draft.json").write_text(json.dumps(facts["draft"], indent=2))
        (best.parent / "last").symlink_to("best", target_is_directory=True)
        (target / "config.yaml").write_text(facts["config_yaml"])
        manifest = facts["manifest"]
        manifest["results"] = {**manifest["results"], "packed_sha256": facts["data_sha256"]}
        (target / "manifest.json").write_text(json.dumps(manifest, indent=2))
        target.rename(folder)


def read_packed(stem: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON of a packed pair, and its tensors in fp32 with `kept_ids`, under the names of a checkpoint.

    Raises ValueError when a file is missing or damaged.
    """
    data, described = stem.with_suffix(".safetensors"), stem.with_suffix(".json")
    repair = "restore it, or install the package again"
    try:
        facts = json.loads(described.read_text())
        content = data.read_bytes()
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"the packed draft {stem} cannot be read ({error}); {repair}.") from error
    if facts.get("format") != PACKED_FORMAT:
        raise ValueError(
            f"{described} has format {facts.get('format')!r}; this version reads {PACKED_FORMAT!r}."
        )
    found = hashlib.sha256(content).hexdigest()
    if found != facts["data_sha256"]:
        raise ValueError(
            f"{data} is damaged: sha256 {found[:16]}..., {described.name} says {facts['data_sha256'][:16]}...; "
            f"{repair}."
        )
    try:
        packed = load(content)
    except SafetensorError as error:
        raise ValueError(f"{data} is damaged ({error}); {repair}.") from error
    marks = np.unpackbits(packed.pop("kept").numpy(), count=facts["draft"]["config"]["vocab_size"])
    tensors = {"kept_ids": torch.from_numpy(np.flatnonzero(marks))}
    for name in [name.removesuffix(".codes") for name in packed if name.endswith(".codes")]:
        scales = packed.pop(f"{name}.scales")
        codes = expand(packed.pop(f"{name}.codes"), packed.pop(f"{name}.wide"), rows=len(scales))
        lines = dequantise(codes, scales)
        tensors[name] = lines.T.contiguous() if name in facts["packing"]["by_column"] else lines
    return facts, tensors | {name: tensor.float() for name, tensor in packed.items()}


def head_sha(rows: Float[Tensor, "V H"]) -> str:
    """sha256 of head rows as bf16."""
    return hashlib.sha256(
        rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    ).hexdigest()


def without_paths(words: list[str]) -> list[str]:
    """Overrides and words of a command without those whose value is an absolute path."""
    return [word for word in words if not re.match(r"(\S*=)?[\[\"']*[/~]", word)]


# ---- the draft of this package


def pretrained_folder() -> Path:
    """`runs/pretrained` of the working directory, unpacked now if it is not there; the verifier is fetched if need be.

    Raises ValueError when the folder is another release's, or the verifier can neither be found nor fetched.
    """
    manifest = FOLDER / "manifest.json"
    if not manifest.is_file():
        unpack(STEM, FOLDER, verifier_rows())
    shipped = json.loads(STEM.with_suffix(".json").read_text())["data_sha256"]
    if json.loads(manifest.read_text())["results"].get("packed_sha256") != shipped:
        raise ValueError(
            f"{FOLDER} was not unpacked from this release's draft; move it away, with its evaluations, and run again."
        )
    return FOLDER


def verifier_rows() -> Float[Tensor, "W H"]:
    """SmolLM2's embedding, which is also its head: from the default cache if there is one, else the verifier's."""
    stored = CACHE / "verifier.safetensors"
    name = "embed_tokens.weight"
    if not stored.is_file():
        stored = smollm2_folder(default_cache_dir() / "smollm2") / "model.safetensors"
        name = f"model.{name}"
    try:
        with safe_open(stored, framework="pt") as file:
            return file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{stored} cannot be read ({error}); remove it and run again.") from error
