"""Tiny verifiers and caches for tests: random weights, a byte-level tokenizer, no download, well under a second."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dspark.verifier import Verifier

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
        return getattr(transformers, f"{names[family]}ForCausalLM")(config)


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
