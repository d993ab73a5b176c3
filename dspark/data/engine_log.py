"""Answers that an engine gave: what `serve_bench` measured, as documents to cache, replay or train on.

An engine generates an order of magnitude faster than a plain loop, and replay of the very text that it served predicts its
counters without the noise of another sample. Both files are the worker's (`dspark/serving_worker.py`): `<label>.job.json`
holds the prompts, `<label>.json` the token ids of every answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dspark.data.prompts import split_of
from dspark.data.responses import TokenDocument


@runtime_checkable
class Templated(Protocol):
    """What is needed of a verifier: its name, tokenizer and chat template (`dspark.verifier.Verifier` has them)."""

    info: Any
    tokenizer: Any

    def chat_ids(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


def engine_documents(
    verifier: Templated,
    job: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    sets: Sequence[str] | None,
    concurrency: int | None,
    domains: Mapping[str, str],
    split_fractions: Mapping[str, float],
    mask_token_id: int,
) -> tuple[list[TokenDocument], Counter[str]]:
    """One document an answer, prompt included, and counts of what was left out (`empty`, `mask_token`,
    `history_rewritten`: a later turn whose history is not the same tokens here).

    `sets` and `concurrency` select cells; every temperature that was measured is kept. A set without an entry in `domains` is its
    own domain; a prompt's split follows from its set and id. Later turns hold the earlier ones as unsupervised context, tokenised as the engine did.

    Raises:
        ValueError: if no cell is selected, or a rendered prompt has another length than the engine saw, which another tokenizer
            or chat template would cause.
    """
    cells = [
        c
        for c in result["cells"]
        if (not sets or c["set"] in sets) and (concurrency is None or c["concurrency"] == concurrency)
    ]
    if not cells:
        measured = sorted({(c["set"], c["concurrency"]) for c in result["cells"]})
        raise ValueError(
            f"no cell has sets {sets} and concurrency {concurrency}; measured (set, concurrency): {measured}."
        )
    documents: list[TokenDocument] = []
    skipped: Counter[str] = Counter()
    for cell in cells:
        prompts = {p["id"]: p["turns"] for p in job["sets"][cell["set"]]}
        messages: dict[str, list[dict[str, str]]] = {}
        for request in sorted(cell["requests"], key=lambda r: (int(r["id"]), r["turn"])):
            talk = messages.setdefault(request["id"], [])
            talk.append({"role": "user", "content": prompts[request["id"]][request["turn"]]})
            ids = verifier.chat_ids(
                talk, add_generation_prompt=True, template_options=job.get("template") or {}
            )
            answer = list(request["token_ids"])
            text = verifier.tokenizer.decode(answer, skip_special_tokens=True)
            talk.append({"role": "assistant", "content": text})
            same_prompt = len(ids) == request["prompt_tokens"]
            if not same_prompt and request["turn"] == 0:
                raise ValueError(
                    f"{cell['set']} prompt {request['id']} has {len(ids)} tokens here and {request['prompt_tokens']} in the engine: "
                    f"{verifier.info.name} has another tokenizer or chat template than the engine's model {job['target']}."
                )
            if not same_prompt:  # an earlier answer, cut inside a character, reads differently here
                skipped["history_rewritten"] += 1
            elif not answer:
                skipped["empty"] += 1
            elif mask_token_id in ids or mask_token_id in answer:
                skipped["mask_token"] += 1
            else:
                prompt_id = f"{cell['set']}-{request['id']}"
                documents.append(
                    TokenDocument(
                        input_ids=tuple(ids + answer),
                        spans=((len(ids), len(ids) + len(answer)),),
                        prompt_id=prompt_id,
                        domain=domains.get(cell["set"], cell["set"]),
                        split=split_of(prompt_id, split_fractions),
                        temperature=float(cell["temperature"]),
                        finish_reason=str(request["finish_reason"]),
                    )
                )
    return documents, skipped


def read_engine_log(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(job, result) of `<label>.json` and the `<label>.job.json` beside it.

    Raises:
        ValueError: if one is missing or not such a file.
    """
    path = Path(path)
    found = []
    for file, key in ((path.with_name(path.stem + ".job.json"), "sets"), (path, "cells")):
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist; expected <label>.json and <label>.job.json of serve_bench."
            )
        value = json.loads(file.read_text())
        if key not in value:
            raise ValueError(f"{file} has no {key!r}; expected what serve_bench's worker reads and writes.")
        found.append(value)
    return found[0], found[1]
