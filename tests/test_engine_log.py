"""Answers of an engine as documents."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from dspark.data.engine_log import engine_documents, read_engine_log

MASK = 999


class Letters:
    """A verifier whose tokens are characters and whose template is `U<user>A<assistant>` with a trailing `A` to answer."""

    info = SimpleNamespace(name="letters")

    def chat_ids(self, messages, *, add_generation_prompt, template_options):
        text = "".join(("U" if m["role"] == "user" else "A") + m["content"] for m in messages) + "A"
        return [ord(c) for c in text]

    @property
    def tokenizer(self):
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(chr(i) for i in ids if i > 2))


def request(number: str, turn: int, prompt_tokens: int, answer: str, eos: bool = True):
    ids = [ord(c) for c in answer] + ([2] if eos else [])
    return {
        "id": number,
        "turn": turn,
        "prompt_tokens": prompt_tokens,
        "token_ids": ids,
        "finish_reason": "stop" if eos else "length",
    }


JOB = {
    "target": "letters",
    "sets": {"chat": [{"id": "0", "turns": ["hi", "so"]}, {"id": "1", "turns": ["yo"]}]},
}


def result(*requests, concurrency=4, temperature=0.0):
    cell = {"set": "chat", "temperature": temperature, "concurrency": concurrency, "requests": list(requests)}
    return {"cells": [cell], "engine": {}}


def documents(results, **changes):
    settings = {
        "sets": None,
        "concurrency": None,
        "domains": {},
        "split_fractions": {"test": 1.0},
        "mask_token_id": MASK,
    }
    return engine_documents(Letters(), JOB, results, **(settings | changes))


def test_every_turn_is_a_document_with_its_history_as_context():
    # Requests come in the order in which they finished.
    found, skipped = documents(
        result(request("0", 1, 11, "ok"), request("1", 0, 4, "well", eos=False), request("0", 0, 4, "abc"))
    )
    assert not skipped
    texts = ["".join(chr(i) for i in d.input_ids if i > 2) for d in found]
    assert texts == ["UhiAabc", "UhiAabcUsoAok", "UyoAwell"]
    assert [d.spans for d in found] == [((4, 8),), ((11, 14),), ((4, 8),)]
    supervised = [[chr(i) for i, on in zip(d.input_ids, d.loss_mask, strict=True) if on] for d in found]
    assert supervised == [list("abc\x02"), list("ok\x02"), list("well")]
    assert [d.prompt_id for d in found] == ["chat-0", "chat-0", "chat-1"]
    assert [d.finish_reason for d in found] == ["stop", "stop", "length"]


def test_a_first_turn_of_another_length_means_another_template():
    with pytest.raises(ValueError, match="4 tokens here and 5 in the engine"):
        documents(result(request("1", 0, 5, "well")))


def test_a_later_turn_whose_history_reads_differently_is_left_out():
    found, skipped = documents(result(request("0", 0, 4, "abc"), request("0", 1, 10, "ok")))
    assert len(found) == 1
    assert skipped == {"history_rewritten": 1}


def test_cells_are_selected_by_name_and_load():
    with pytest.raises(ValueError, match=r"measured \(set, concurrency\): \[\('chat', 4\)\]"):
        documents(result(request("1", 0, 4, "well")), concurrency=16)
    found, _ = documents(result(request("1", 0, 4, "well"), temperature=1.0), sets=["chat"], concurrency=4)
    assert (found[0].temperature, found[0].domain) == (1.0, "chat")


def test_files_are_read_together_and_missing_ones_named(tmp_path):
    (tmp_path / "verifier.json").write_text(json.dumps(result()))
    with pytest.raises(ValueError, match=r"verifier\.job\.json does not exist"):
        read_engine_log(tmp_path / "verifier.json")
    (tmp_path / "verifier.job.json").write_text(json.dumps({"cells": []}))
    with pytest.raises(ValueError, match="has no 'sets'"):
        read_engine_log(tmp_path / "verifier.json")
    (tmp_path / "verifier.job.json").write_text(json.dumps(JOB))
    job, answers = read_engine_log(tmp_path / "verifier.json")
    assert job == JOB
    assert answers["cells"]
