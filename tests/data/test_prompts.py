"""Prompts: templates disjoint between splits, JSONL readers that lose nothing silently, and prompts a verifier writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dspark.data.prompts import Opening, Prompt, read_jsonl, self_prompts, split_of
from dspark.data.synthetic import tiny_verifier
from dspark.data.templates import DOMAINS, TASKS, TEMPLATES, opening_of, template_prompts

ALL = {"train": 1.0}
SPLIT = {"train": 0.8, "validation": 0.1, "test": 0.1}


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def read(path: Path, **changes: object):
    return read_jsonl(
        path, **{"domain": "chat", "split_fractions": ALL, "role_map": {}, "limit": None, **changes}
    )


def test_no_template_or_task_serves_two_splits() -> None:
    for groups in (*TEMPLATES.values(), TASKS):
        splits = [set(groups[s]) for s in ("train", "validation", "test")]
        assert sum(map(len, splits)) == len(set.union(*splits))
    assert sum(len(t["train"]) for t in TEMPLATES.values()) >= 60


def test_template_prompts_are_distinct_complete_and_repeatable() -> None:
    counts = {"train": 300, "validation": 60, "test": 60}
    prompts = template_prompts(counts=counts, domains=DOMAINS, seed=0)
    assert prompts == template_prompts(counts=counts, domains=DOMAINS, seed=0)
    assert prompts != template_prompts(counts=counts, domains=DOMAINS, seed=1)
    assert len({p.prompt_id for p in prompts}) == 420
    for split, count in counts.items():
        for domain in DOMAINS:
            assert sum(p.split == split and p.domain == domain for p in prompts) == count // 3
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        assert "{task}" not in text
        assert "{n" not in text


def test_a_larger_request_begins_with_the_smaller_one() -> None:
    small = template_prompts(counts={"test": 12}, domains=["math"], seed=0)
    large = template_prompts(counts={"test": 30}, domains=["math"], seed=0)
    assert large[:12] == small


def test_too_many_or_unknown_template_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown prompt domains \['cooking'\]"):
        template_prompts(counts={"train": 1}, domains=["cooking"], seed=0)
    with pytest.raises(ValueError, match=r"unknown splits \['dev'\]"):
        template_prompts(counts={"dev": 1}, domains=["math"], seed=0)
    with pytest.raises(ValueError, match=r"give \d+ distinct prompts, 100000 were asked for"):
        template_prompts(counts={"validation": 100_000}, domains=["code"], seed=0)


def test_turns_and_messages_become_prompts_and_given_answers_are_left_out(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"turns": ["hello", "and then?"], "domain": "math"},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "an answer somebody else wrote"},
                {"role": "user", "content": "why?"},
                {"role": "assistant", "content": "another"},
            ]
        },
        "",
    )
    prompts, skipped = read(path)
    assert not skipped
    assert [m["content"] for m in prompts[0].messages] == ["hello", "and then?"]
    assert (prompts[0].domain, prompts[0].turn_ends) == ("math", (1, 2))
    assert [m["content"] for m in prompts[1].messages] == ["be brief", "hi", "why?"]
    assert (prompts[1].domain, prompts[1].turn_ends) == ("chat", (2, 3))


def test_bad_rows_are_counted_and_the_rest_survives(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"turns": ["a"]},
        "{broken",
        {"text": "no turns here"},
        {"turns": []},
        {"turns": ["b", "  "]},
        {"turns": [3]},
        {"turns": ["a"]},
        {"turns": ["c"]},
        {"turns": ["d"]},
    )
    prompts, skipped = read(path, limit=2)
    assert [p.messages[0]["content"] for p in prompts] == ["a", "c"]
    assert skipped == {"bad_row": 3, "empty_turn": 2, "duplicate": 1, "over_limit": 1}
    assert len(prompts) + sum(skipped.values()) == 9


def test_unknown_roles_raise_unless_mapped(tmp_path: Path) -> None:
    row = {"messages": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yes"}]}
    path = jsonl(tmp_path / "p.jsonl", row)
    with pytest.raises(
        ValueError, match=r"p\.jsonl line 1: unknown role 'human'.*data\.role_map\.human=user"
    ):
        read(path)
    prompts, _ = read(path, role_map={"human": "user", "gpt": "assistant"})
    assert prompts[0].messages == ({"role": "user", "content": "hi"},)


def test_empty_missing_and_useless_files_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty; expected one JSON object a line"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"2 rows but no usable prompt; left out: \{'empty_turn': 2\}"):
        read(jsonl(tmp_path / "u.jsonl", {"turns": [""]}, {"turns": []}))


@pytest.mark.parametrize("fractions", [{"train": 0.5}, {"train": 1.2, "test": -0.2}])
def test_split_fractions_must_sum_to_one(tmp_path: Path, fractions: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="split fractions"):
        read(jsonl(tmp_path / "p.jsonl", {"turns": ["a"]}), split_fractions=fractions)


def test_splits_are_disjoint_complete_and_do_not_depend_on_order_or_size(tmp_path: Path) -> None:
    rows = [{"turns": [f"question {i}", "and more"]} for i in range(400)]
    forward, _ = read(jsonl(tmp_path / "a.jsonl", *rows), split_fractions=SPLIT)
    backward, _ = read(jsonl(tmp_path / "b.jsonl", *reversed(rows[:150])), split_fractions=SPLIT)
    split = {p.prompt_id: p.split for p in forward}
    assert len(split) == 400
    assert all(split[p.prompt_id] == p.split for p in backward)
    counts = {s: sum(v == s for v in split.values()) for s in SPLIT}
    assert 290 < counts["train"] < 350
    assert min(counts.values()) > 20
    assert split_of("x", {"train": 0.0, "test": 1.0}) == "test"


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["one\u2028two\x85three"]}\n{"turns": ["four"]}\n', encoding="utf-8")
    prompts, skipped = read(path)
    assert [p.messages[0]["content"] for p in prompts] == ["one\u2028two\x85three", "four"]
    assert not skipped


def test_a_row_may_name_its_split(tmp_path: Path) -> None:
    prompts, _ = read(jsonl(tmp_path / "p.jsonl", {"turns": ["a"], "split": "test"}), split_fractions=SPLIT)
    assert prompts[0].split == "test"
    with pytest.raises(ValueError, match="split is 'dev'"):
        read(jsonl(tmp_path / "q.jsonl", {"turns": ["a"], "split": "dev"}), split_fractions=SPLIT)


def test_a_verifier_writes_its_own_prompts() -> None:
    verifier = tiny_verifier()
    arguments = {
        "seed": 3,
        "temperature": 1.0,
        "max_new_tokens": 160,
        "batch_size": 32,
        "template_options": {},
    }
    prompts, left_out = self_prompts(verifier, counts={"train": 1, "test": 1}, **arguments)
    assert [p.split for p in prompts] == ["train", "test"]
    assert all(p.domain == "self" and len(p.messages[0]["content"]) >= 8 for p in prompts)
    assert sum(left_out.values()) >= 0
    again, _ = self_prompts(verifier, counts={"train": 1, "test": 1}, **arguments)
    assert again == prompts
    with pytest.raises(ValueError, match=r"wrote \d+ usable prompts of 2 wanted; left out:"):
        self_prompts(verifier, counts={"train": 2}, **{**arguments, "max_new_tokens": 1})


def test_an_opening_begins_the_prompt_that_the_verifier_writes_and_names_its_domain() -> None:
    verifier = tiny_verifier()
    given = [Opening(text=f"word {i}", domain="ab"[i % 2], ending=" END") for i in range(40)]
    prompts, _ = self_prompts(
        verifier,
        counts={"train": 3},
        seed=3,
        temperature=1.0,
        max_new_tokens=160,
        batch_size=32,
        template_options={},
        opening=lambda i: given[i % 40],
    )
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        assert text.startswith("word ")
        assert text.endswith(" END")
        assert prompt.domain == "ab"[int(text.split()[1][0]) % 2] or not text.split()[1].isdigit()
    assert len({p.prompt_id for p in prompts}) == 3


def test_openings_take_turns_between_domains_and_repeat() -> None:
    drawn = [opening_of(i, domains=DOMAINS, seed=5) for i in range(300)]
    assert drawn == [opening_of(i, domains=DOMAINS, seed=5) for i in range(300)]
    assert [o.domain for o in drawn[:6]] == [*DOMAINS, *DOMAINS]
    assert len({o.text for o in drawn}) > 150
    assert not [o for o in drawn if re.search(r"\{[A-Za-z]+\d?[:}]", o.text)], "a slot was left open"
    boxed = [o.ending.endswith("\\boxed{}.") for o in drawn if o.domain == "math"]
    assert 0.3 < sum(boxed) / len(boxed) < 0.7
    assert not any(o.ending for o in drawn if o.domain != "math")
    with pytest.raises(ValueError, match="unknown prompt domains"):
        opening_of(0, domains=["cooking"], seed=0)


def test_prompt_ids_are_content_hashes() -> None:
    one = Prompt.from_turns(["a", "b"], domain="chat", split="train")
    same = Prompt.from_turns(["a", "b"], domain="math", split="test")
    other = Prompt.from_turns(["a"], domain="chat", split="train", system="b")
    assert one.prompt_id == same.prompt_id != other.prompt_id
