"""From documents as tokens to documents with hidden states: batches of like length through the verifier, and a re-run check."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dspark.data.features import Document
from dspark.data.responses import TokenDocument
from dspark.verifier import Verifier


def length_batches(lengths: Sequence[int], *, tokens_per_batch: int, seed: int) -> list[list[int]]:
    """Indices in batches of like length, each at most `tokens_per_batch` tokens with its padding.

    The batches come in random order: a byte budget or a kill then leaves a sample of all lengths, and the time left is
    predictable.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= tokens_per_batch:
            batches[-1].append(i)
        else:
            batches.append([i])
    random.Random(seed).shuffle(batches)
    return batches


def capture_batch(
    verifier: Verifier, documents: Sequence[TokenDocument], *, aux_layer_ids: Sequence[int]
) -> list[Document]:
    """Hidden states of a few documents from one right-padded forward pass; each document gets its own copy.

    Raises:
        ValueError: if a token id has no embedding row, or the pass returns another number of rows than tokens.
    """
    lengths = torch.tensor([len(d.input_ids) for d in documents])
    padded = torch.zeros(len(documents), int(lengths.max()), dtype=torch.long)
    for b, document in enumerate(documents):
        padded[b, : lengths[b]] = torch.tensor(document.input_ids)
    if int(padded.max()) >= verifier.info.vocab_size:
        raise ValueError(
            f"token id {int(padded.max())} has no row among the {verifier.info.vocab_size} embeddings of "
            f"{verifier.info.name!r}; the documents were tokenised for another verifier."
        )
    states = verifier.capture(padded, aux_layer_ids=aux_layer_ids, lengths=lengths)
    out = []
    for b, (document, n) in enumerate(zip(documents, lengths.tolist(), strict=True)):
        if states.aux.shape[1] < n:
            raise ValueError(f"{n} tokens went in, {states.aux.shape[1]} rows of hidden states came out.")
        out.append(
            Document(
                input_ids=padded[b, :n].clone(),
                loss_mask=torch.tensor(document.loss_mask),
                aux=states.aux[b, :n].cpu().clone(),
                last=states.last[b, :n].cpu().clone(),
                lse=states.lse[b, :n].cpu().clone(),
                info=document.info(),
            )
        )
    return out


def capture_documents(
    verifier: Verifier,
    documents: Sequence[TokenDocument],
    *,
    aux_layer_ids: Sequence[int],
    tokens_per_batch: int,
    seed: int,
) -> Iterator[Document]:
    """Yield every document with its hidden states, in the order of `length_batches`."""
    lengths = [len(d.input_ids) for d in documents]
    for batch in length_batches(lengths, tokens_per_batch=tokens_per_batch, seed=seed):
        yield from capture_batch(verifier, [documents[i] for i in batch], aux_layer_ids=aux_layer_ids)


@dataclass(frozen=True, kw_only=True)
class Recheck:
    """Largest relative differences between captured states and a second pass over single documents.

    `aux` and `last` are ||a - b|| / ||b|| per token, `lse` is absolute; `same_top1` is the share of positions where the
    stored state's arg max equals that of the model's own logits.
    """

    documents: int
    aux: float
    last: float
    lse: float
    same_top1: float


def recheck(verifier: Verifier, documents: Sequence[Document], *, aux_layer_ids: Sequence[int]) -> Recheck:
    """Run documents one at a time, compare with what a batch stored, and the stored targets with the model's own logits."""
    worst = {"aux": 0.0, "last": 0.0, "lse": 0.0}
    same = total = 0
    for document in documents:
        again = verifier.capture(document.input_ids[None], aux_layer_ids=aux_layer_ids)
        for name in ("aux", "last"):
            a, b = getattr(document, name).float(), getattr(again, name)[0].cpu().float()
            worst[name] = max(
                worst[name], float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-6)).max())
            )
        worst["lse"] = max(worst["lse"], float((document.lse - again.lse[0].cpu()).abs().max()))
        with torch.inference_mode():
            ids = document.input_ids[None].to(verifier.device)
            own = verifier.model(input_ids=ids, use_cache=False).logits[0].argmax(-1).cpu()
        stored = torch.cat(
            [verifier.logits(part.to(verifier.device)).argmax(-1).cpu() for part in document.last.split(256)]
        )
        same, total = same + int((own == stored).sum()), total + len(own)
    return Recheck(documents=len(documents), same_top1=same / max(1, total), **worst)
