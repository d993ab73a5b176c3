"""A small draft inside the package, for whoever has trained nothing: `run=pretrained` wherever a run folder is accepted.

It is stored as a pair: `<stem>.safetensors` with the weights in few bits, `<stem>.json` with all that a run folder says beside them.
Frozen rows (embedding, head) are the verifier's and left out; unpacking takes them from the verifier and checks a hash. The
first use writes an ordinary run folder, `runs/pretrained`, so no other part of the package knows about packing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int8
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from dspark.verifier import default_cache_dir, smollm2_folder

NAME = "pretrained"
FOLDER = Path("runs") / NAME
STEM = Path(__file__).parent / "data" / "embedded" / NAME
CACHE = Path("data") / "cache" / "smollm2"
PACKED_FORMAT = "dspark-packed-1"

# Scales tried for each group, as shares of the one at which nothing is clipped: a clipped outlier often costs less than
# coarser steps for its 63 neighbours.
SHRINK = torch.linspace(1.0, 0.5, 21)


# ---- few bits


def quantise(
    matrix: Float[Tensor, "R C"], *, bits: int, group: int
) -> tuple[Int8[Tensor, "R C"], Float[Tensor, "R G"]]:
    """Integers in +-(2^(bits-1) - 1) and an fp16 scale for each `group` neighbours of a row: matrix ~ codes * scale.

    Each scale is the one of `SHRINK` with the least squared error, so a group never does worse than with its largest value
    on the last step. Where a row is no multiple of `group`, groups are the largest divisor of both.
    """
    top = 2 ** (bits - 1) - 1
    groups = matrix.float().reshape(matrix.shape[0], -1, math.gcd(matrix.shape[1], group))
    peak = groups.abs().amax(-1, keepdim=True)
    best, least = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    for share in SHRINK.tolist():
        scale = (peak * share / top).half().float()  # as it will be stored
        error = (groups - _codes(groups, scale, top) * scale).square().sum(-1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    codes = _codes(groups, best, top).to(torch.int8)
    return codes.reshape(matrix.shape), best.squeeze(-1).half()


def dequantise(codes: Int8[Tensor, "R C"], scales: Float[Tensor, "R G"]) -> Float[Tensor, "R C"]:
    """The fp32 matrix that codes and scales stand for."""
    groups = codes.float().reshape(*scales.shape, -1)
    return (groups * scales.float().unsqueeze(-1)).reshape(codes.shape)


def _codes(groups: Tensor, scale: Tensor, top: int) -> Tensor:
    # An all-zero group (or one below fp16) has scale 0; its codes are 0 whatever it is divided by.
    return (groups / scale.where(scale > 0, torch.inf)).round().clamp(-top, top)


def squeeze(codes: Int8[Tensor, "R C"]) -> Tensor:
    """Codes as a zlib stream, uint8. Small codes are the common ones, and Huffman coding alone spends bits accordingly:
    a tenth less than packing `bits` each, while searching for repetitions would find none and cost a twentieth."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    stream = packer.compress(codes.contiguous().numpy().tobytes()) + packer.flush()
    return torch.from_numpy(np.frombuffer(stream, np.uint8).copy())


def expand(stream: Tensor, *, rows: int) -> Int8[Tensor, "R C"]:
    codes = np.frombuffer(zlib.decompress(stream.numpy().tobytes()), np.int8)
    return torch.from_numpy(codes.copy()).reshape(rows, -1)


# ---- the pair of files


def pack(
    run: Path, stem: Path, *, bits: int, group: int, origin: Mapping[str, Any], measured: Mapping[str, Any]
) -> int:
    """Write the best draft of a run folder as `<stem>.safetensors` and `<stem>.json`; returns the bytes of both.

    `origin` is what exports say about the verifier (fields of `dspark.export.Origin`); `measured` is kept as given. Paths of
    the machine that trained are left out. The same input gives the same bytes.
    Raises ValueError when `bits` does not fit, or a weight is not finite in fp16.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits}; expected 2 to 8.")
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
            codes, packed[f"{name}.scales"] = quantise(tensor, bits=bits, group=group)
            packed[f"{name}.codes"] = squeeze(codes)
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
        "packing": {"bits": bits, "group": group, "vectors": "float16"},
        "measured": dict(measured),
        "draft": {**description, "origin": dict(origin)},
        "manifest": manifest,
        "config_yaml": re.sub(r"(?m)^( *\w+:) /.*$", r"\1 null", (run / "config.yaml").read_text()),
    }
    text = json.dumps(facts, indent=1) + "\n"
    stem.with_suffix(".json").write_text(text)
    return data.stat().st_size + len(text.encode())


def unpack(stem: Path, folder: Path, head: Float[Tensor, "W H"]) -> None:
    """Write the run folder that a packed pair stands for. `head` is the verifier's output head, all rows.

    The folder appears whole or not at all.
    Raises ValueError when the pair is damaged or the head is another verifier's, FileExistsError when the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is no complete run; remove it and run again.")
    facts, tensors = read_packed(stem)
    config = facts["draft"]["config"]
    fits = tuple(head.shape) == (config["vocab_size"], config["hidden_size"])
    rows = head[tensors["kept_ids"]].to(torch.bfloat16) if fits else head
    if head_sha(rows) != facts["head_sha256"]:
        raise ValueError(
            f"the packed draft {stem.name} belongs to verifier {facts['manifest']['verifier'].get('name')!r}, and these head rows "
            f"{tuple(head.shape)} are not that verifier's. Fetch it with `python -m experiments.collect`."
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
            f"{data} is damaged: sha256 {found[:16]}..., {described.name} says {facts['data_sha256'][:16]}...; {repair}."
        )
    try:
        packed = load(content)
    except SafetensorError as error:
        raise ValueError(f"{data} is damaged ({error}); {repair}.") from error
    marks = np.unpackbits(packed.pop("kept").numpy(), count=facts["draft"]["config"]["vocab_size"])
    tensors = {"kept_ids": torch.from_numpy(np.flatnonzero(marks))}
    for name in [name.removesuffix(".codes") for name in packed if name.endswith(".codes")]:
        scales = packed.pop(f"{name}.scales")
        tensors[name] = dequantise(expand(packed.pop(f"{name}.codes"), rows=len(scales)), scales)
    return facts, tensors | {name: tensor.float() for name, tensor in packed.items()}


def head_sha(rows: Float[Tensor, "V H"]) -> str:
    """sha256 of head rows as bf16."""
    return hashlib.sha256(rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


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
    """SmolLM2's embedding, which is also its head: from the default cache where that lies here, else from the verifier."""
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
