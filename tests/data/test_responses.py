"""Answers: generation equals the verifier's own, masks come from generation boundaries, and token sets come back whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dspark.data.capture import capture_batch, capture_documents, length_batches, recheck
from dspark.data.generation import IDLE_SHARE, Request, Response, generate, pick_tokens
from dspark.data.prompts import Prompt
from dspark.data.responses import TokenDocument, TokenSet, answer_prompts
from dspark.data.synthetic import FAMILIES, MASK_TOKEN, tiny_documents, tiny_prompts, tiny_verifier
from dspark.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier()


def requests(count: int, *, temperature: float = 0.0) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [
        Request(
            prompt_ids=torch.randint(8, 260, (n,), generator=generator).tolist(),
            temperature=temperature,
            seed=i,
        )
        for i, n in enumerate(lengths)
    ]


def answers(
    verifier: Verifier, prompts: list[Prompt], **changes: object
) -> tuple[list[TokenDocument], Counter[str]]:
    settings = {
        "temperature": 0.0,
        "seed": 0,
        "max_new_tokens": 12,
        "max_length": 96,
        "batch_size": 8,
        "mask_token_id": MASK_TOKEN,
        "template_options": {},
        "progress": lambda _n: None,
    }
    return answer_prompts(verifier, prompts, **{**settings, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_generation_equals_transformers_row_by_row(family: str) -> None:
    verifier = tiny_verifier(family)
    asked = requests(6)
    found = dict(generate(verifier, asked, max_new_tokens=15, batch_size=4))
    assert sorted(found) == list(range(6))
    for i, request in enumerate(asked):
        ids = torch.tensor([request.prompt_ids])
        own = verifier.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, do_sample=False
        )
        assert found[i].token_ids == own[0, ids.shape[1] :].tolist()
    assert verifier.model.config._attn_implementation == "sdpa"


def test_a_response_ends_with_the_end_of_turn_token_exactly_when_it_stopped(verifier: Verifier) -> None:
    found = dict(generate(verifier, requests(40, temperature=1.0), max_new_tokens=60, batch_size=16))
    reasons = Counter(r.finish_reason for r in found.values())
    assert reasons["stop"] and reasons["length"], "this test needs both"  # noqa: PT018
    for response in found.values():
        if response.finish_reason == "stop":
            assert response.token_ids[-1] == 2
            assert 2 not in response.token_ids[:-1]
        else:
            assert len(response.token_ids) == 60
            assert 2 not in response.token_ids


def test_sampled_rows_do_not_depend_on_their_batch(verifier: Verifier) -> None:
    asked = requests(9, temperature=1.0)
    together = dict(generate(verifier, asked, max_new_tokens=10, batch_size=9))
    apart = dict(generate(verifier, asked, max_new_tokens=10, batch_size=2))
    assert together == apart


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_rows_that_idle_in_their_batch_change_nothing(
    share: float, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(12, temperature=1.0)
    plain = dict(generate(verifier, asked, max_new_tokens=40, batch_size=12))
    assert len({len(r.token_ids) for r in plain.values()}) > 1, "rows must finish at different times"
    monkeypatch.setitem(IDLE_SHARE, "cpu", share)
    assert dict(generate(verifier, asked, max_new_tokens=40, batch_size=12)) == plain


def test_sampling_follows_the_distribution_at_its_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20_000
    draws = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    picked = pick_tokens(logits.repeat(n, 1), torch.full((n,), 0.7), draws)
    expected = (logits / 0.7).softmax(-1) * n
    observed = torch.bincount(picked, minlength=4).float()
    assert ((observed - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001
    assert torch.equal(pick_tokens(logits[None], torch.zeros(1), draws[:1]), torch.tensor([2]))


def test_the_mask_covers_what_was_generated_and_nothing_else(verifier: Verifier) -> None:
    documents, skipped = answers(verifier, tiny_prompts(counts={"train": 8}))
    assert not skipped
    for document, prompt in zip(documents, tiny_prompts(counts={"train": 8}), strict=True):
        rendered = verifier.chat_ids(prompt.messages, add_generation_prompt=True)
        assert list(document.input_ids[: len(rendered)]) == rendered
        assert document.loss_mask == [i >= len(rendered) for i in range(len(document.input_ids))]
        info = document.info()
        assert (info.prompt_tokens, info.tokens) == (len(rendered), len(document.input_ids))
        assert info.response_tokens == sum(document.loss_mask)


TWO_TURNS = Prompt.from_turns(["a?", "b?"], domain="chat", split="train")

THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '[think]\n\n[/think]\n' }}{% endif %}{% endif %}"
)


def test_thinking_text_that_the_template_supplies_is_prompt_and_not_supervised(verifier: Verifier) -> None:
    """Golden tokens: with thinking off the empty block belongs to the prompt; with it on, the first own token is masked in."""
    thinker = tiny_verifier()
    thinker.tokenizer.chat_template = THINKING_TEMPLATE
    byte = lambda text: thinker.encode(text)  # noqa: E731
    prompt = Prompt.from_turns(["hi"], domain="chat", split="train")
    (on,), _ = answers(thinker, [prompt])
    (off,), _ = answers(thinker, [prompt], template_options={"enable_thinking": False})
    start = [3, *byte("hi"), 2, 4]
    assert list(on.input_ids[: on.spans[0][0]]) == start
    assert list(off.input_ids[: off.spans[0][0]]) == [*start, *byte("[think]\n\n[/think]\n")]
    for document in (on, off):
        (span,) = document.spans
        assert span[1] == len(document.input_ids)
        if document.finish_reason == "stop":
            assert document.input_ids[-1] == 2
            assert document.loss_mask[-1]


def scripted(*texts: str) -> Callable[..., Iterator[tuple[int, Response]]]:
    """Stands in for `generate`: says the given texts, each closed by the end-of-turn token unless it ends with a bar."""
    said = iter(texts)

    def respond(verifier: Verifier, asked: Sequence[Request], **_: object) -> Iterator[tuple[int, Response]]:
        for i, _request in enumerate(asked):
            text = next(said)
            ids = verifier.encode(text.removesuffix("|"))
            yield i, Response(ids, "length") if text.endswith("|") else Response([*ids, 2], "stop")

    return respond


def test_every_turn_is_answered_in_the_tokens_of_the_turns_before(verifier: Verifier) -> None:
    (document,), skipped = answers(verifier, [TWO_TURNS], respond=scripted("yes", "no"))
    whole = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "no"},
    ]
    assert list(document.input_ids) == verifier.chat_ids(whole, add_generation_prompt=False)
    supervised = [t for t, on in zip(document.input_ids, document.loss_mask, strict=True) if on]
    assert supervised == [*verifier.encode("yes"), 2, *verifier.encode("no"), 2]
    assert len(document.spans) == 2
    assert not skipped


def test_a_cut_answer_is_closed_by_the_template_without_supervising_that_token(verifier: Verifier) -> None:
    (document,), _ = answers(verifier, [TWO_TURNS], respond=scripted("too long|", "no"))
    end = document.spans[0][1]
    assert document.input_ids[end] == 2
    assert not document.loss_mask[end]


def test_a_template_that_rewrites_history_ends_the_conversation_and_is_counted() -> None:
    rewriting = tiny_verifier()
    rewriting.tokenizer.chat_template = THINKING_TEMPLATE.replace(
        "m['content']", "m['content'].split('!')[-1]"
    )
    (document,), skipped = answers(rewriting, [TWO_TURNS], respond=scripted("thought! answer"))
    assert skipped == {"history_rewritten": 1}
    assert len(document.spans) == 1


def test_long_prompts_are_counted_and_refused_only_if_all_are_too_long(verifier: Verifier) -> None:
    short, long = (
        Prompt.from_turns(["a?"], domain="chat", split="train"),
        Prompt.from_turns(["a" * 200], domain="chat", split="train"),
    )
    documents, skipped = answers(verifier, [short, long])
    assert len(documents) == 1
    assert skipped == {"too_long": 1}
    with pytest.raises(
        ValueError, match=r"all 1 prompts are longer than max_length=96 tokens \(the longest has 204\)"
    ):
        answers(verifier, [long])
    two_turns = Prompt.from_turns(["a?", "b" * 200], domain="chat", split="train")
    (document,), skipped = answers(verifier, [two_turns])
    assert skipped == {"turn_too_long": 1}
    assert len(document.spans) == 1


def test_no_document_is_longer_than_the_limit(verifier: Verifier) -> None:
    documents, _ = answers(verifier, tiny_prompts(counts={"train": 6}), max_length=24, max_new_tokens=50)
    assert documents
    assert all(len(d.input_ids) <= 24 for d in documents)


def test_text_with_the_mask_token_is_left_out(verifier: Verifier) -> None:
    prompt = Prompt.from_turns(["what is <|mask|>?"], domain="chat", split="train")
    documents, skipped = answers(verifier, [prompt])
    assert not documents
    assert skipped == {"mask_token": 1}


def test_adding_prompts_changes_no_other_answer(verifier: Verifier) -> None:
    prompts = tiny_prompts(counts={"train": 12})
    few, _ = answers(verifier, prompts[3:7], temperature=1.0)
    many, _ = answers(verifier, list(reversed(prompts)), temperature=1.0)
    by_id = {d.prompt_id: d for d in many}
    assert all(by_id[d.prompt_id] == d for d in few)


def token_set(verifier: Verifier, documents: list[TokenDocument]) -> TokenSet:
    return TokenSet.create(
        documents,
        verifier=verifier.info,
        command="test",
        generation={"max_new_tokens": 24},
        dataset="tiny",
        skipped={"too_long": 2},
    )


def test_a_token_set_comes_back_equal_and_its_manifest_counts_it(tmp_path: Path, verifier: Verifier) -> None:
    documents = tiny_documents(verifier, counts={"train": 9, "validation": 3, "test": 3})
    files = token_set(verifier, documents).save(tmp_path / "set")
    again = TokenSet.load(tmp_path / "set")
    assert again.documents == tuple(documents)
    facts = again.manifest
    assert facts["counts"]["split"] == {"test": 3, "train": 9, "validation": 3}
    assert facts["response_tokens"] == sum(sum(d.loss_mask) for d in documents)
    assert facts["verifier"]["weights_sha"] == verifier.info.weights_sha
    assert (facts["command"], facts["skipped"]) == ("test", {"too_long": 2})
    assert [f.suffix for f in files] == [".npz", ".json"]
    before = files[0].read_bytes()
    token_set(verifier, documents).save(tmp_path / "set")
    assert files[0].read_bytes() == before, "the same documents must give the same file"


def test_a_damaged_or_foreign_token_set_is_refused(tmp_path: Path, verifier: Verifier) -> None:
    documents = tiny_documents(verifier, counts={"train": 3})
    data, manifest = token_set(verifier, documents).save(tmp_path / "set")
    other = tiny_verifier(seed=1)
    with pytest.raises(ValueError, match=r"holds answers of 'tiny-llama', not of 'tiny-llama' \(weights_sha"):
        TokenSet.load(tmp_path / "set").check_verifier(other.info)
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"set\.npz is damaged"):
        TokenSet.load(tmp_path / "set")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "format_version": 9}))
    with pytest.raises(ValueError, match="format version 9"):
        TokenSet.load(tmp_path / "set")
    data.unlink()
    with pytest.raises(ValueError, match=r"set\.npz is missing"):
        TokenSet.load(tmp_path / "set")
    with pytest.raises(ValueError, match=r"no document of 'tiny' is left; skipped: \{'too_long': 2\}"):
        token_set(verifier, [])


def test_length_batches_hold_every_document_once_within_the_token_limit() -> None:
    lengths = torch.randint(5, 300, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = length_batches(lengths, tokens_per_batch=1000, seed=0)
    assert sorted(i for b in batches for i in b) == list(range(500))
    padded = [len(b) * max(lengths[i] for i in b) for b in batches]
    assert max(padded) <= 1000
    assert sum(lengths) / sum(padded) > 0.95
    assert batches != sorted(batches, key=lambda b: lengths[b[0]]), "batches of all lengths must come mixed"


def test_batched_capture_equals_single_documents_and_a_wrong_state_is_noticed(verifier: Verifier) -> None:
    tokens = tiny_documents(verifier, counts={"train": 12})
    documents = list(capture_documents(verifier, tokens, aux_layer_ids=(1, 3), tokens_per_batch=256, seed=0))
    result = recheck(verifier, documents, aux_layer_ids=(1, 3), last="post_norm")
    assert (result.documents, result.same_top1) == (12, 1.0)
    assert result.problem("float32") is None
    shifted = recheck(verifier, documents, aux_layer_ids=(1, 2), last="post_norm")
    assert "states differ" in shifted.problem("float32")
    spoilt = [type(d)(**{**vars(d), "last": d.last.roll(1, dims=0)}) for d in documents]
    assert recheck(verifier, spoilt, aux_layer_ids=(1, 3), last="post_norm").problem("float32")


def test_rows_of_states_equal_rows_of_tokens(verifier: Verifier) -> None:
    tokens = tiny_documents(verifier, counts={"train": 5})
    for document, token in zip(capture_batch(verifier, tokens, aux_layer_ids=(2,)), tokens, strict=True):
        n = len(token.input_ids)
        assert document.input_ids.tolist() == list(token.input_ids)
        assert (document.aux.shape, document.last.shape, document.lse.shape) == ((n, 1, 32), (n, 32), (n,))


def test_tokens_without_an_embedding_row_are_refused(verifier: Verifier) -> None:
    stray = TokenDocument(
        input_ids=(1, 500, 8),
        spans=((2, 3),),
        prompt_id="x",
        domain="chat",
        split="train",
        temperature=0.0,
        finish_reason="stop",
    )
    with pytest.raises(ValueError, match="token id 500 has no row among the 272 embeddings"):
        capture_batch(verifier, [stray], aux_layer_ids=(1,))
