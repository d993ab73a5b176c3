"""Run folders: what a run was, what it measured, and the weights it left.

runs/<run_id>/
  manifest.json            command, overrides, config hash, code version, seed, packages, data fingerprint, status, times
  config.yaml              the resolved configuration
  metrics.parquet          run_id, step, name, total, count; divide when reading, so shards and ranks add exactly
  checkpoints/best/        draft.safetensors + draft.json, chosen by validation tau; `last/` likewise
  checkpoints/last.ckpt    the trainer's full state, for resuming
  eval/<dataset>/          slots.parquet, rounds.parquet, summary.json
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark import pretrained
from dspark.config import Contract, DraftConfig
from dspark.nn.draft import Draft

FORMAT = "dspark-draft-1"
PACKAGES = ("torch", "lightning", "transformers", "safetensors", "hydra-core", "numpy", "pandas")


@dataclass
class RunManifest:
    """Enough to say what produced a run and to rebuild it."""

    run_id: str
    command: str
    overrides: list[str]
    config_sha: str
    seed: int
    verifier: dict[str, Any]
    data: dict[str, Any]
    parent: dict[str, str] | None
    code: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    device: str = ""
    status: str = "running"
    started: str = ""
    finished: str | None = None
    results: dict[str, Any] = field(default_factory=dict)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_run_id(label: str, seed: int) -> str:
    """Sortable and readable: date, time, label, seed."""
    safe = "".join(c if c.isalnum() or c in "-_.+" else "-" for c in label)[:60].strip("-") or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{safe}-s{seed}"


def code_version(root: Path) -> dict[str, str]:
    """git commit and a hash of uncommitted changes; 'unknown' outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout

    try:
        diff = git("diff", "HEAD")
        return {
            "commit": git("rev-parse", "HEAD").strip(),
            "dirty": hashlib.sha256(diff.encode()).hexdigest()[:12] if diff else "",
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": ""}


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu x{torch.get_num_threads()}"


class Run:
    """One run folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, root: Path, manifest: RunManifest, config_yaml: str) -> Run:
        """Make `root/<run_id>/` with manifest and configuration. Raises FileExistsError if it is there already."""
        run = cls(Path(root) / manifest.run_id)
        run.path.mkdir(parents=True)
        (run.path / "config.yaml").write_text(config_yaml)
        manifest.started = utc_now()
        manifest.code = code_version(Path(__file__).resolve().parent.parent)
        manifest.packages = package_versions()
        manifest.device = device_name()
        run.write_manifest(manifest)
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """An existing run; `pretrained` is the draft that comes with the package, unpacked when first opened.

        Raises FileNotFoundError that says what is missing and what runs there are.
        """
        path = Path(path)
        if path == pretrained.FOLDER or (path == Path(pretrained.NAME) and not path.exists()):
            path = pretrained.pretrained_folder()
        if not (path / "manifest.json").is_file():
            siblings = (
                sorted(p.parent.name for p in path.parent.glob("*/manifest.json"))
                if path.parent.is_dir()
                else []
            )
            hint = f" Runs there: {', '.join(siblings[-5:])}." if siblings else ""
            raise FileNotFoundError(f"{path} is not a run folder: it has no manifest.json.{hint}")
        return cls(path)

    @property
    def manifest(self) -> RunManifest:
        try:
            return RunManifest(**json.loads((self.path / "manifest.json").read_text()))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"{self.path / 'manifest.json'} is damaged ({error}); train again or restore it."
            ) from error

    def write_manifest(self, manifest: RunManifest) -> None:
        write_text(self.path / "manifest.json", json.dumps(asdict(manifest), indent=2))

    def reconfigure(self, config_yaml: str, config_sha: str) -> None:
        """Record the configuration that a resumed run goes on with."""
        write_text(self.path / "config.yaml", config_yaml)
        manifest = self.manifest
        manifest.config_sha = config_sha
        self.write_manifest(manifest)

    def finish(self, status: str, results: dict[str, Any]) -> None:
        """Record how the run ended."""
        manifest = self.manifest
        manifest.status, manifest.finished = status, utc_now()
        manifest.results |= results
        self.write_manifest(manifest)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, which: str) -> Path:
        """Folder of the `best` or `last` draft. Raises ValueError when the run never got that far."""
        folder = self.checkpoints / which
        if not (folder / "draft.json").is_file():
            raise ValueError(
                f"run {self.path.name} has no complete '{which}' checkpoint (status: {self.manifest.status}). "
                "Let training finish, resume it with resume=<run folder>, or name another run."
            )
        return folder

    def eval_folder(self, dataset: str) -> Path:
        return self.path / "eval" / dataset


def write_text(path: Path, text: str) -> None:
    """Write through a temporary name, so that readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Parquet through a temporary name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    frame.to_parquet(temporary, index=False)
    os.replace(temporary, path)


def read_table(path: Path) -> pd.DataFrame:
    """A parquet table. Raises FileNotFoundError or ValueError that name the file and the command that makes it."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; run `python -m experiments.evaluate` for that run and set first."
        )
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}); evaluate again.") from error


def save_draft(
    draft: Draft,
    folder: Path,
    contract: Contract,
    facts: dict[str, Any],
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write `draft.safetensors` and `draft.json` (configuration, contract, facts). The JSON comes last: it marks completeness.

    `state` is the draft's state dictionary in whole tensors, for a draft whose own are sharded over processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = draft.state_dict() if state is None else state
    tensors = {name: t.detach().contiguous().cpu() for name, t in state.items()}
    temporary = folder / "draft.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": FORMAT})
    (folder / "draft.json").unlink(missing_ok=True)
    os.replace(temporary, folder / "draft.safetensors")
    description = {"format": FORMAT, "config": asdict(draft.config), "contract": asdict(contract), **facts}
    write_text(folder / "draft.json", json.dumps(description, indent=2))


def load_draft(folder: Path, *, attention_backend: str) -> tuple[Draft, Contract, dict[str, Any]]:
    """The draft of a checkpoint folder, without embeddings: call `set_embedding` with the verifier's before use.

    Raises ValueError when the folder is incomplete or its tensors do not match its configuration.
    """
    path = folder / "draft.json"
    if not path.is_file() or not (folder / "draft.safetensors").is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: expected draft.json and draft.safetensors.")
    description = json.loads(path.read_text())
    if description.get("format") != FORMAT:
        raise ValueError(f"{path} has format {description.get('format')!r}; this version reads {FORMAT!r}.")
    draft = Draft(DraftConfig.from_dict(description["config"]), attention_backend=attention_backend)
    try:
        with safe_open(folder / "draft.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder / 'draft.safetensors'} is damaged ({error}); restore it or train again."
        ) from error
    draft.lm_head = draft.lm_head.to(tensors["lm_head"].dtype)
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder}: tensors do not match draft.json: {error}") from error
    facts = {k: v for k, v in description.items() if k not in ("format", "config", "contract")}
    return draft, Contract(**description["contract"]), facts


def current_command() -> str:
    """The command line as typed, with the module form restored."""
    program = Path(sys.argv[0])
    name = f"-m experiments.{program.stem}" if program.parent.name == "experiments" else program.name
    return " ".join(["python", name, *sys.argv[1:]])
