"""Prompts: what a user asks, in one or more turns, before any answer. JSONL readers and self-synthesis.

Answers that a file happens to hold are left out: a draft learns from what the verifier itself would say.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.data.generation import Request, generate
from dspark.verifier import Verifier

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")

# Self-written prompts drawn beyond the wanted number, then beyond twice the missing number, in each of up to three attempts.
SPARE_DRAWS = 8


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation without its answers: messages of role system or user.

    The verifier answers every user message; `turn_ends[k]` is how many messages precede answer k.
    """

    messages: tuple[dict[str, str], ...]
    turn_ends: tuple[int, ...]
    domain: str
    split: str

    @property
    def prompt_id(self) -> str:
        """Content hash of the messages."""
        text = json.dumps([[m["role"], m["content"]] for m in self.messages], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_turns(
        cls, turns: Sequence[str], *, domain: str, split: str, system: str | None = None
    ) -> Prompt:
        """User turns, each to be answered."""
        head = [{"role": "system", "content": system}] if system else []
        messages = (*head, *({"role": "user", "content": t} for t in turns))
        ends = tuple(len(head) + i + 1 for i in range(len(turns)))
        return cls(messages=messages, turn_ends=ends, domain=domain, split=split)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The first words of a user turn that the verifier goes on to write; `ending` is added to what it wrote."""

    text: str
    domain: str
    ending: str = ""


def read_jsonl(
    path: str | Path,
    *,
    domain: str,
    split_fractions: Mapping[str, float],
    role_map: Mapping[str, str],
    limit: int | None,
) -> tuple[list[Prompt], Counter[str]]:
    """Prompts of a file with one `{"turns": [...]}` or `{"messages": [{"role", "content"}, ...]}` object a line.

    A row may carry its own `domain` and `split`; otherwise `domain` is used, and the split follows from the content hash and
    `split_fractions` (which sum to 1), so that equal conversations always share a split. `role_map` renames roles first.
    `limit` keeps the first so many usable rows. Also returns why rows were left out: `bad_row`, `empty_turn`, `duplicate`.

    Raises:
        ValueError: for an empty file, a file without one usable row, a role that is neither known nor mapped, an unknown split,
            or fractions that do not sum to 1.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist.")
    _check_fractions(split_fractions)
    skipped: Counter[str] = Counter()
    prompts: dict[str, Prompt] = {}
    rows = 0
    # Not splitlines: a prompt may hold U+2028 and other separators that JSON leaves as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        rows += 1
        try:
            row = json.loads(line)
            messages = _messages_of(row)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            log.warning("%s line %d is no prompt row (%s); skipped", path, number, error)
            skipped["bad_row"] += 1
            continue
        prompt = _prompt_of(messages, role_map=role_map, where=f"{path} line {number}")
        if prompt is None:
            log.warning("%s line %d has an empty turn or no user turn; skipped", path, number)
            skipped["empty_turn"] += 1
            continue
        split = row.get("split") or split_of(prompt.prompt_id, split_fractions)
        if split not in split_fractions:
            raise ValueError(
                f"{path} line {number}: split is {split!r}; expected one of {sorted(split_fractions)}."
            )
        if prompt.prompt_id in prompts:
            skipped["duplicate"] += 1
            continue
        if limit is not None and len(prompts) >= limit:
            skipped["over_limit"] += 1
            continue
        prompts[prompt.prompt_id] = Prompt(
            messages=prompt.messages,
            turn_ends=prompt.turn_ends,
            domain=str(row.get("domain") or domain),
            split=split,
        )
    if not rows:
        raise ValueError(
            f'prompt file {path} is empty; expected one JSON object a line: {{"turns": ["..."]}} or {{"messages": [...]}}.'
        )
    if not prompts:
        raise ValueError(
            f"prompt file {path} has {rows} rows but no usable prompt; left out: {dict(skipped)}."
        )
    return list(prompts.values()), skipped


def split_of(prompt_id: str, fractions: Mapping[str, float]) -> str:
    """The split a prompt belongs to, decided by its content hash alone."""
    point = int(hashlib.sha256(prompt_id.encode()).hexdigest()[:12], 16) / 16**12
    for name, fraction in fractions.items():
        if point < fraction:
            return name
        point -= fraction
    return next(reversed(fractions))


def self_prompts(
    verifier: Verifier,
    *,
    counts: Mapping[str, int],
    seed: int,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    template_options: Mapping[str, Any],
    opening: Callable[[int], Opening] | None = None,
) -> tuple[list[Prompt], Counter[str]]:
    """Prompts that the verifier writes itself: it continues an opened user turn until it ends that turn.

    `opening(i)` begins the turn of draw i and names its domain; by default a turn is open from its first word and its domain is
    `self`. `counts[split]` prompts are wanted per split; up to three attempts are made. Returned with counts of draws left out:
    `unfinished` (no end of turn within `max_new_tokens`), `empty`, `duplicate`.

    Raises:
        ValueError: if too few usable prompts came out.
    """
    wanted = sum(counts.values())
    opened = _open_user_turn(verifier, template_options)
    specials = set(verifier.tokenizer.all_special_ids)
    texts: dict[str, str] = {}  # and their domains
    left_out: Counter[str] = Counter()
    for attempt in range(3):
        if len(texts) >= wanted:
            break
        count = (wanted if attempt == 0 else 2 * (wanted - len(texts))) + SPARE_DRAWS
        draws = range(attempt * 100_003, attempt * 100_003 + count)
        openings = [opening(draw) if opening else Opening(text="", domain="self") for draw in draws]
        begun = {text: verifier.encode(opened + text) for text in {o.text for o in openings}}
        requests = [
            Request(prompt_ids=begun[o.text], temperature=temperature, seed=seed * 1_000_003 + draw)
            for draw, o in zip(draws, openings, strict=True)
        ]
        drawn = dict(generate(verifier, requests, max_new_tokens=max_new_tokens, batch_size=batch_size))
        for i, response in sorted(drawn.items()):
            written = verifier.tokenizer.decode(response.token_ids[:-1])
            text = (openings[i].text + written).strip() + openings[i].ending
            if response.finish_reason != "stop":
                left_out["unfinished"] += 1
            elif len(text) < 8 or specials & set(response.token_ids[:-1]):
                left_out["empty"] += 1
            elif text in texts:
                left_out["duplicate"] += 1
            else:
                texts[text] = openings[i].domain
    if len(texts) < wanted:
        raise ValueError(
            f"{verifier.info.name!r} wrote {len(texts)} usable prompts of {wanted} wanted; left out: {dict(left_out)}. "
            "Ask for fewer, or raise the temperature or the length limit of self-written prompts."
        )
    names = [split for split, count in counts.items() for _ in range(count)]
    return [
        Prompt.from_turns([text], domain=domain, split=split)
        for (text, domain), split in zip(texts.items(), names, strict=False)
    ], left_out


def _open_user_turn(verifier: Verifier, template_options: Mapping[str, Any]) -> str:
    marker = "\u2042content\u2042"
    text = verifier.chat_text(
        [{"role": "user", "content": marker}], add_generation_prompt=False, template_options=template_options
    )
    if marker not in text:
        raise ValueError(f"the chat template of {verifier.info.name!r} does not show what a user says.")
    return text[: text.index(marker)]


def _messages_of(row: Any) -> list[dict[str, str]]:
    if "turns" in row:
        if not isinstance(row["turns"], list):
            raise TypeError("turns is not a list")
        messages = [{"role": "user", "content": turn} for turn in row["turns"]]
    else:
        messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
    if not all(isinstance(m["content"], str) for m in messages):
        raise TypeError("a message's content is not text")
    return messages


def _prompt_of(messages: list[dict[str, str]], *, role_map: Mapping[str, str], where: str) -> Prompt | None:
    kept: list[dict[str, str]] = []
    for message in messages:
        role = role_map.get(message["role"], message["role"])
        if role not in ROLES:
            raise ValueError(
                f"{where}: unknown role {message['role']!r}; expected one of {ROLES}. Map it with data.role_map, for example "
                f"data.role_map.{message['role']}=user."
            )
        if role == "assistant":
            continue
        if not message["content"].strip():
            return None
        kept.append({"role": role, "content": message["content"]})
    ends = tuple(i + 1 for i, message in enumerate(kept) if message["role"] == "user")
    return Prompt(messages=tuple(kept[: ends[-1]]), turn_ends=ends, domain="", split="") if ends else None


def _check_fractions(fractions: Mapping[str, float]) -> None:
    if abs(sum(fractions.values()) - 1.0) > 1e-6 or min(fractions.values(), default=0) < 0:
        raise ValueError(
            f"split fractions are {dict(fractions)}; expected non-negative numbers that sum to 1."
        )
