"""Prompts: what a user asks, in one or more turns, before any answer. Readers for JSONL files and self-synthesis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

ROLES = ("system", "user")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation without its answers: messages of role system or user.

    `turn_ends[k]` is how many messages precede answer k, so consecutive user messages can share an answer.
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
