"""Hidden states that other tools captured, read document by document: the speculators cache and vLLM's connector files.

Both store `hidden_states` [S, L + 1, H] with layer ids ascending and, last, the verifier's raw output before its final norm;
ids mean the residual stream after that many layers, as here. Our cache keeps that state as it is and says `pre_norm`.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.data.features import Document, Manifest, target_lse
from dspark.data.prompts import split_of
from dspark.data.responses import TokenDocument

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForeignRow:
    """One captured conversation: its tokens and the file that holds its states."""

    document: TokenDocument
    file: Path


def read_speculators(
    folder: str | Path, *, temperature: float, domain: str, split_fractions: Mapping[str, float]
) -> tuple[list[ForeignRow], Counter[str]]:
    """Rows of a speculators training folder: a saved `datasets` table and `hidden_states/hs_{row}.safetensors`.

    Rows without a file or without one supervised token are left out and counted (`no_states`, `unsupervised`).

    Raises:
        ValueError: if the folder holds no such table, or no row is usable.
    """
    folder = Path(folder)
    table = _arrow_table(folder)
    for column in ("input_ids", "loss_mask"):
        if column not in table.column_names:
            raise ValueError(f"the table in {folder} has columns {table.column_names}; expected {column}.")
    skipped: Counter[str] = Counter()
    rows: list[ForeignRow] = []
    for number, (ids, mask) in enumerate(
        zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    ):
        file = folder / "hidden_states" / f"hs_{number}.safetensors"
        spans = spans_of(mask)
        if not file.is_file():
            skipped["no_states"] += 1
        elif not spans:
            skipped["unsupervised"] += 1
        else:
            rows.append(_row(file, ids, spans, temperature, domain, split_fractions, {}))
    return _usable(rows, skipped, folder)


def read_vllm(
    folder: str | Path,
    *,
    boundaries: str | Path | None,
    temperature: float,
    domain: str,
    split_fractions: Mapping[str, float],
) -> tuple[list[ForeignRow], Counter[str]]:
    """Rows of a folder that vLLM's hidden-states connector wrote, one `{request_id}.safetensors` a request.

    The files do not say which tokens were generated. `boundaries` is a JSONL file with one
    `{"file": name, "prompt_tokens": n}` a line, optionally with `domain`, `split`, `temperature` and `finish_reason`.

    Raises:
        ValueError: without boundaries, for an entry without `prompt_tokens`, or when no file is usable.
    """
    folder = Path(folder)
    if boundaries is None or not Path(boundaries).is_file():
        raise ValueError(
            f"{folder}: boundaries file {boundaries} does not exist. Captured files do not say where the answer starts; give "
            'data.boundaries=<file.jsonl> with one {"file": name, "prompt_tokens": n} a line.'
        )
    known: dict[str, dict] = {}
    for number, line in enumerate(Path(boundaries).read_text().splitlines(), start=1):
        if line.strip():
            entry = json.loads(line)
            if not {"file", "prompt_tokens"} <= set(entry):
                raise ValueError(f"{boundaries} line {number}: expected the keys file and prompt_tokens.")
            known[Path(entry["file"]).name] = entry
    skipped: Counter[str] = Counter()
    rows: list[ForeignRow] = []
    for file in sorted(folder.glob("*.safetensors")):
        entry = known.get(file.name)
        if entry is None:
            skipped["no_boundary"] += 1
        elif _being_written(file):
            skipped["being_written"] += 1
        else:
            try:
                with safe_open(file, framework="pt") as handle:
                    ids = handle.get_tensor("token_ids").tolist()
            except (SafetensorError, OSError):
                skipped["unreadable"] += 1
                continue
            start = int(entry["prompt_tokens"])
            if not 0 < start < len(ids):
                skipped["unsupervised"] += 1
                continue
            rows.append(_row(file, ids, [(start, len(ids))], temperature, domain, split_fractions, entry))
    return _usable(rows, skipped, folder)


def foreign_documents(
    rows: Sequence[ForeignRow], *, weights: Mapping[str, Tensor], manifest: Manifest
) -> Iterator[Document]:
    """Documents with the states from each row's file; `lse` is computed with the verifier's own norm and head.

    Raises:
        ValueError: if a file's tokens are not the row's, or its states have another shape than `manifest` says.
    """
    layers, hidden = len(manifest.aux_layer_ids), manifest.verifier.hidden_size
    for row in rows:
        ids = torch.tensor(row.document.input_ids)
        with safe_open(row.file, framework="pt") as handle:
            states = handle.get_tensor("hidden_states")
            if "hidden_states_scales" in handle.keys():  # noqa: SIM118
                states = states.float() * handle.get_tensor("hidden_states_scales")
            tokens = handle.get_tensor("token_ids").long()
        if not torch.equal(tokens, ids):
            raise ValueError(
                f"{row.file} holds states of other tokens than its row in the table; capture it again."
            )
        if tuple(states.shape) != (len(ids), layers + 1, hidden):
            raise ValueError(
                f"{row.file} holds hidden states of shape {tuple(states.shape)}; {len(ids)} tokens, {layers} aux layers and the "
                f"last one need {(len(ids), layers + 1, hidden)}. Check data.layer_ids and the verifier."
            )
        states = states.to(torch.bfloat16)
        last = states[:, -1].contiguous()
        yield Document(
            input_ids=ids,
            loss_mask=torch.tensor(row.document.loss_mask),
            aux=states[:, :-1].contiguous(),
            last=last,
            lse=torch.cat([target_lse(part, weights, manifest) for part in last.split(512)]),
            info=row.document.info(),
        )


def spans_of(mask: Sequence[int | bool]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive true entries."""
    spans: list[tuple[int, int]] = []
    for i, on in enumerate(mask):
        if on and spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        elif on:
            spans.append((i, i + 1))
    return spans


def _row(
    file: Path,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    temperature: float,
    domain: str,
    split_fractions: Mapping[str, float],
    entry: Mapping[str, object],
) -> ForeignRow:
    prompt = TokenDocument(
        input_ids=tuple(ids[: spans[0][0]]),
        spans=((0, 0),),
        prompt_id="",
        domain=domain,
        split="train",
        temperature=0.0,
        finish_reason="stop",
    )
    prompt_id = prompt.info().doc_id[:16]
    return ForeignRow(
        document=TokenDocument(
            input_ids=tuple(ids),
            spans=tuple(spans),
            prompt_id=prompt_id,
            domain=str(entry.get("domain", domain)),
            split=str(entry.get("split") or split_of(prompt_id, split_fractions)),
            temperature=float(entry.get("temperature", temperature)),
            finish_reason=str(entry.get("finish_reason", "stop")),
        ),
        file=file,
    )


def _usable(
    rows: list[ForeignRow], skipped: Counter[str], folder: Path
) -> tuple[list[ForeignRow], Counter[str]]:
    if not rows:
        raise ValueError(f"{folder} has no usable captured document; left out: {dict(skipped) or 'nothing'}.")
    return rows, skipped


def _arrow_table(folder: Path):
    import pyarrow

    state = folder / "state.json"
    if not state.is_file():
        raise ValueError(f"{folder} holds no saved datasets table (state.json is missing).")
    tables = []
    for part in json.loads(state.read_text())["_data_files"]:
        with pyarrow.memory_map(str(folder / part["filename"])) as source:
            tables.append(pyarrow.ipc.open_stream(source).read_all())
    return pyarrow.concat_tables(tables)


def _being_written(file: Path) -> bool:
    """Whether the connector still holds its exclusive lock on the file's companion."""
    lock = Path(f"{file}.lock")
    if not lock.exists():
        return False
    with lock.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
