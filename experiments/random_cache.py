"""A feature cache of random hidden states, to rehearse and time a recipe before its verifier has been captured.

    python -m experiments.random_cache --geometry kimi --documents 96 --tokens 2500 --out data/cache/random-kimi
    python -m experiments.train experiment=kimi_k27_code data.cache=data/cache/random-kimi verifier.aux_layer_ids=null \\
        verifier.mask_token_id=null trainer.devices=1 trainer.accumulate=8 trainer.max_steps=50 trainer.val_every=50

Shapes and dtypes are those of a captured cache (`experiments/bench_step.py` has the geometries); the verifier's rows are random
too, so nothing can be learned from it but how fast and in how much memory a training runs. Held-out documents are short.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dspark.data.features import (
    Document,
    DocumentInfo,
    FeatureWriter,
    Manifest,
    document_id,
    target_lse,
)
from dspark.verifier import VerifierInfo
from experiments.bench_step import GEOMETRIES, PROMPT, SPREAD, Geometry

HELD_OUT = 512  # tokens of a held-out document: every one of its tokens is an anchor


def described(geometry: Geometry, name: str, seed: int) -> Manifest:
    """What a cache of `geometry` says about itself. The mask token is the last id, which no document contains."""
    config = geometry.config()
    sha = hashlib.sha256(f"random {name} {seed}".encode()).hexdigest()
    verifier = VerifierInfo(
        name=f"random-{name}",
        path="",
        revision=None,
        architecture="random",
        weights_sha=sha,
        hidden_size=config.hidden_size,
        num_layers=config.num_verifier_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        tokenizer_size=config.vocab_size,
        tied=False,
        logit_scale=1.0,
        compute_dtype="bfloat16",
        tokenizer_sha=sha,
        chat_template_sha=sha,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )
    return Manifest(
        verifier=verifier,
        aux_layer_ids=config.aux_layer_ids,
        mask_token_id=config.mask_token_id,
        last="post_norm",
        dataset="random",
        responses_by=verifier.name,
        generation={"temperature": 0.0},
        capture={"random": True, "seed": seed},
        command=f"python -m experiments.random_cache --geometry {name} --seed {seed}",
    )


def random_documents(
    manifest: Manifest, head: torch.Tensor, documents: int, tokens: int, generator: torch.Generator
) -> Iterator[Document]:
    """`documents` greedy answers of `tokens` tokens, prompt included; of every 24, one validates and one tests.

    Numbers are drawn on the generator's device, where `head` [W, H] must be.
    """
    device = generator.device
    hidden, layers = manifest.verifier.hidden_size, len(manifest.aux_layer_ids)
    for number in range(documents):
        split = {22: "validation", 23: "test"}.get(number % 24, "train")
        length = tokens if split == "train" else min(tokens, HELD_OUT)
        ids = torch.randint(
            manifest.verifier.vocab_size - 1, (length,), generator=generator, device=device
        ).cpu()
        states = torch.empty(length, layers + 1, hidden, dtype=torch.bfloat16, device=device)
        states.normal_(generator=generator)
        lse = torch.cat(
            [target_lse(rows, {"lm_head.weight": head}, manifest) for rows in states[:, layers].split(2048)]
        )
        states = states.cpu()
        mask = torch.arange(length) >= PROMPT
        name = document_id(ids, mask, temperature=0.0)
        yield Document(
            input_ids=ids,
            loss_mask=mask,
            aux=states[:, :layers],
            last=states[:, layers],
            lse=lse.cpu(),
            info=DocumentInfo(
                doc_id=name,
                prompt_id=name,
                domain="random",
                split=split,
                temperature=0.0,
                finish_reason="length",
                prompt_tokens=PROMPT,
                response_tokens=length - PROMPT,
                tokens=length,
            ),
        )


def write(
    out: Path, *, geometry: str, documents: int, tokens: int, seed: int, device: str = "cpu"
) -> Manifest:
    """The whole cache. Raises ValueError for an unknown geometry, too few documents or tokens, or a folder of another cache."""
    if geometry not in GEOMETRIES:
        raise ValueError(f"geometry is {geometry!r}; expected one of {sorted(GEOMETRIES)}.")
    if documents < 24 or tokens < 2 * PROMPT:
        raise ValueError(
            f"{documents} documents of {tokens} tokens; expected at least 24, for all three splits, of {2 * PROMPT} tokens."
        )
    manifest = described(GEOMETRIES[geometry], geometry, seed)
    info, generator = manifest.verifier, torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0.0, std, generator=generator)

    weights = {
        "embed_tokens.weight": normal(info.vocab_size, info.hidden_size, std=1.0),
        "norm.weight": torch.ones(info.hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": normal(info.vocab_size, info.hidden_size, std=SPREAD * info.hidden_size**-0.5),
    }
    with FeatureWriter(out, manifest, shard_bytes=1 << 30) as writer:
        writer.write_frozen({name: t.cpu() for name, t in weights.items()}, info.weights_sha)
        made = random_documents(manifest, weights["lm_head.weight"], documents, tokens, generator)
        for number, document in enumerate(made, 1):
            writer.add(document)
            print(f"\r{number} of {documents} documents", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr for a caller's mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="kimi", help=f"out of {', '.join(sorted(GEOMETRIES))}")
    parser.add_argument("--documents", type=int, default=24, help="at least 24 (default: 24)")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each document (default: 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where numbers are drawn: cpu or cuda (default: cpu)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    given = parser.parse_args(argv)
    started = time.time()
    try:
        written = write(
            given.out,
            geometry=given.geometry,
            documents=given.documents,
            tokens=given.tokens,
            seed=given.seed,
            device=given.device,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{written.documents} documents, {written.tokens} tokens, {written.bytes / 1e9:.2f} GB; {time.time() - started:.0f} s; "
        f"cache {given.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
