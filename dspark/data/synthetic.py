"""Tiny verifiers and caches for tests: random weights, a byte-level tokenizer, no download, well under a second."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dspark.data.capture import capture_documents
from dspark.data.features import FeatureCache, FeatureWriter, Manifest
from dspark.data.prompts import Prompt
from dspark.data.responses import TokenDocument, answer_prompts
from dspark.verifier import Verifier

MASK_TOKEN = 6
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|mask|>",
    "<|unused|>",
)
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte: ids 0-7 are special, 8-263 the bytes; with a chat template of one token a role."""
    specials = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**specials, **{symbol: i + len(specials) for i, symbol in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "llama",
    *,
    hidden_size: int = 32,
    num_layers: int = 4,
    vocab_size: int = 272,
    tied: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A random causal language model of one of `FAMILIES`; `overrides` reach its Transformers configuration."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3": "Gemma3"}
    if family not in names:
        raise ValueError(f"family is {family!r}; expected one of {FAMILIES}.")
    config_name = "Gemma3TextConfig" if family == "gemma3" else f"{names[family]}Config"
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Large enough that the random model prefers some tokens clearly to others.
        "initializer_range": 0.3,
        "attn_implementation": "sdpa",
    }
    if family == "gemma2":
        settings |= {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    if family.startswith("gemma"):
        settings |= {"query_pre_attn_scalar": hidden_size // 4}
    config = getattr(transformers, config_name)(**{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
        # Norm weights of ones would hide on which side of a norm a state is.
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data.add_(torch.rand_like(weight) - 0.5)
        return model


def tiny_verifier(
    family: str = "llama",
    *,
    hidden_size: int = 32,
    num_layers: int = 4,
    vocab_size: int = 272,
    tied: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Verifier:
    """`tiny_model` as a verifier; its 272 embedding rows exceed the tokenizer's 264 entries on purpose."""
    model = tiny_model(
        family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        tied=tied,
        seed=seed,
        **overrides,
    )
    return Verifier.from_model(model, tiny_tokenizer(), name=f"tiny-{family}")


def tiny_prompts(
    *, counts: dict[str, int], domains: Sequence[str] = ("math", "chat"), seed: int = 0
) -> list[Prompt]:
    """Short distinct questions of made-up words, `counts[split]` a split, domains in turn."""
    rng = random.Random(seed)
    prompts: dict[str, Prompt] = {}
    for split, count in counts.items():
        first = len(prompts)
        while len(prompts) < first + count:
            text = " ".join(
                "".join(rng.choices("abcdefgh", k=rng.randint(2, 4))) for _ in range(rng.randint(1, 4))
            )
            domain = domains[(len(prompts) - first) % len(domains)]
            prompts.setdefault(text, Prompt.from_turns([f"{text}?"], domain=domain, split=split))
    return list(prompts.values())


def tiny_documents(
    verifier: Verifier, *, counts: dict[str, int], max_new_tokens: int = 24, seed: int = 0
) -> list[TokenDocument]:
    """The tiny verifier's answers to `tiny_prompts`: every second one greedy, the others drawn at temperature 1."""
    # A random model may well emit the mask token; such documents are left out, so ask for some more than needed.
    prompts = tiny_prompts(counts={k: n + 4 + n // 4 for k, n in counts.items()}, seed=seed)
    warm = {p.prompt_id for p in prompts[1::2]}
    documents, _ = answer_prompts(
        verifier,
        prompts,
        temperature=lambda p: 1.0 if p.prompt_id in warm else 0.0,
        seed=seed,
        max_new_tokens=max_new_tokens,
        max_length=128,
        batch_size=64,
        mask_token_id=MASK_TOKEN,
        template_options={},
        progress=lambda _tokens: None,
    )
    return [d for k, n in counts.items() for d in [d for d in documents if d.split == k][:n]]


def tiny_manifest(verifier: Verifier, *, aux_layer_ids: Sequence[int] = (1, 2, 3)) -> Manifest:
    """The fields a cache of `tiny_documents` starts from."""
    return Manifest(
        verifier=verifier.info,
        aux_layer_ids=tuple(aux_layer_ids),
        mask_token_id=MASK_TOKEN,
        last="post_norm",
        dataset="synthetic",
        responses_by=verifier.info.name,
        generation={"temperature": "0 and 1"},
        capture={"use_cache": False},
        command="synthetic_cache",
    )


def synthetic_cache(
    path: str | Path,
    *,
    verifier: Verifier | None = None,
    counts: dict[str, int] | None = None,
    max_new_tokens: int = 24,
    aux_layer_ids: Sequence[int] = (1, 2, 3),
    shard_bytes: int = 16_000,
    seed: int = 0,
) -> FeatureCache:
    """A small valid cache in several shards: three splits, two domains, greedy and sampled answers."""
    verifier = verifier or tiny_verifier()
    counts = counts or {"train": 16, "validation": 6, "test": 6}
    documents = tiny_documents(verifier, counts=counts, max_new_tokens=max_new_tokens, seed=seed)
    with FeatureWriter(
        path, tiny_manifest(verifier, aux_layer_ids=aux_layer_ids), shard_bytes=shard_bytes
    ) as writer:
        writer.write_verifier(verifier)
        for document in capture_documents(
            verifier, documents, aux_layer_ids=aux_layer_ids, tokens_per_batch=1024, seed=seed
        ):
            writer.add(document)
    return FeatureCache.open(path)
