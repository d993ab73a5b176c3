"""From documents as tokens to documents with hidden states: batches of like length through the verifier, and a re-run check."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.data.features import Document
from dspark.data.responses import TokenDocument
from dspark.verifier import Capture, Verifier


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


def capture_packed(
    verifier: Verifier, documents: Sequence[TokenDocument], *, aux_layer_ids: Sequence[int]
) -> Capture:
    """Hidden states of a few documents from one right-padded forward pass, end to end on the verifier's device.

    aux bf16 [T, L, H], last bf16 [T, H], lse fp32 [T] over the T tokens of all documents.

    Raises:
        ValueError: if a token id has no embedding row.
    """
    lengths = torch.tensor([len(d.input_ids) for d in documents])
    padded = torch.zeros(len(documents), int(lengths.max()), dtype=torch.long)
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    padded[real] = torch.tensor([token for d in documents for token in d.input_ids])
    if int(padded.max()) >= verifier.info.vocab_size:
        raise ValueError(
            f"token id {int(padded.max())} has no row among the {verifier.info.vocab_size} embeddings of "
            f"{verifier.info.name!r}; the documents were tokenised for another verifier."
        )
    states = verifier.capture(padded, aux_layer_ids=aux_layer_ids, lengths=lengths)
    index = real.flatten().nonzero().squeeze(-1).to(verifier.device)
    return Capture(
        aux=states.aux.flatten(0, 1)[index],
        last=states.last.flatten(0, 1)[index],
        lse=states.lse.flatten()[index],
    )


def capture_batch(
    verifier: Verifier, documents: Sequence[TokenDocument], *, aux_layer_ids: Sequence[int]
) -> list[Document]:
    """Hidden states of a few documents from one forward pass, in host memory; they share one tensor of each kind.

    Raises:
        ValueError: if a token id has no embedding row.
    """
    states = capture_packed(verifier, documents, aux_layer_ids=aux_layer_ids)
    lengths = [len(d.input_ids) for d in documents]
    split = (t.split(lengths) for t in _in_host_memory([states.aux, states.last, states.lse]))
    return [
        Document(
            input_ids=torch.tensor(document.input_ids),
            loss_mask=torch.tensor(document.loss_mask),
            aux=aux,
            last=last,
            lse=lse,
            info=document.info(),
        )
        for document, aux, last, lse in zip(documents, *split, strict=True)
    ]


def _in_host_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, in pinned memory if they come from a GPU: its allocator keeps pages for the next batch."""
    if not tensors[0].is_cuda:
        return [t.cpu() for t in tensors]
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


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
    """How far stored states are from a second pass over single documents.

    `aux` and `last` are ||a - b|| / ||b||, averaged over tokens and layers; `same_top1` is the share of positions where the
    stored state's arg max is also the model's own, or within bf16 rounding of it.
    """

    documents: int
    aux: float
    last: float
    same_top1: float

    def problem(self, compute_dtype: str) -> str | None:
        """What is wrong, in words; None when the states agree as well as the compute dtype allows."""
        allowed = {"float32": 0.01, "bfloat16": 0.06}.get(compute_dtype, 0.06)
        if not max(self.aux, self.last) <= allowed:
            return f"states differ by {self.aux:.3g} (aux) and {self.last:.3g} (last), allowed {allowed:g}"
        if not self.same_top1 >= 0.99:
            return (
                f"only {self.same_top1:.1%} of the stored targets have the verifier's own most likely token"
            )
        return None


@torch.inference_mode()
def recheck(
    verifier: Verifier, documents: Sequence[Document], *, aux_layer_ids: Sequence[int], last: str
) -> Recheck:
    """Run documents one at a time and compare with what was stored; `last` says on which side of the norm that is."""
    sums, tokens, same = {"aux": 0.0, "last": 0.0}, 0, 0
    for document in documents:
        ids = document.input_ids[None]
        again = verifier.capture(ids, aux_layer_ids=aux_layer_ids)
        stored = document.last.to(verifier.device)
        if last == "pre_norm":
            stored = verifier.decoder.norm(stored.to(verifier.compute_dtype)).to(torch.bfloat16)
        pairs = {
            "aux": (document.aux.flatten(0, 1), again.aux[0].flatten(0, 1)),
            "last": (stored, again.last[0]),
        }
        for name, (a, b) in pairs.items():
            a, b = a.cpu().float(), b.cpu().float()
            relative = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-6)
            sums[name] += float(relative.mean()) * ids.shape[1]
        own = verifier.model(input_ids=ids.to(verifier.device), use_cache=False).logits[0].float()
        top = torch.cat([verifier.logits(part).argmax(-1) for part in stored.split(256)])
        best = own.max(-1).values
        close = own.gather(-1, top[:, None])[:, 0] >= best - best.abs() / 128
        same, tokens = same + int(close.sum()), tokens + ids.shape[1]
    return Recheck(
        documents=len(documents),
        same_top1=same / max(1, tokens),
        **{name: total / max(1, tokens) for name, total in sums.items()},
    )
