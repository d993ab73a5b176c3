"""Watch speculation at work: `python -m experiments.demo prompt="..."`.

The answer streams as rounds finish. Tokens that the draft proposed and the verifier kept are coloured by their position in the
block; tokens that the verifier had to supply itself stay uncoloured. The last line compares both speeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from dspark.data.generation import Request, generate
from dspark.decode import Round, decode
from dspark.runs import Run
from dspark.verifier import Verifier
from experiments.cli import command
from experiments.collect import load_verifier
from experiments.evaluate import decode_settings, draft_for_verifier

console = Console()

# From the first proposal to the last: the further from the anchor, the warmer.
SHADES = ("#4fa3e0", "#35b59a", "#7fc24a", "#d8c13a", "#eb9a3c", "#e8693f", "#d9486f", "#a45ad1")


@command("demo")
def main(cfg: DictConfig) -> None:
    run = Run.open(cfg.run) if cfg.run else newest_run(Path(cfg.runs))
    run.checkpoint("best")
    if not str(cfg.prompt).strip():
        raise ValueError('prompt is empty; ask something: prompt="Why is the sky blue?"')
    with console.status("loading the verifier and the draft"):
        verifier = load_verifier(cfg)
        draft = draft_for_verifier(run, verifier, cfg.draft_dtype)
    messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
    messages.append({"role": "user", "content": str(cfg.prompt)})
    options = OmegaConf.to_container(cfg.template_options, resolve=True)
    text = verifier.chat_text(messages, add_generation_prompt=True, template_options=options)
    request = Request(
        prompt_ids=verifier.encode(text), temperature=float(cfg.temperature), seed=int(cfg.seed)
    )
    settings = decode_settings(cfg, draft)

    # A first short answer pays for allocations, which neither speed should carry.
    for _ in decode(
        verifier, draft, [request], settings=settings, batch_size=1, diagnostics=False, limits=[4]
    ):
        pass
    for position in range(1, settings.num_proposals + 1):
        console.print(Text(f" {position} ", f"bold black on {shade(position)}"), end=" ")
    console.print(Text(f"kept draft by position; plain: the verifier's own   [{run.path.name}]\n", "dim"))
    rounds = []
    for piece, step in readable(
        verifier, decode(verifier, draft, [request], settings=settings, batch_size=1, diagnostics=False)
    ):
        console.print(piece, end="", soft_wrap=True)
        rounds.append(step)
    console.print("\n")
    console.print(last_line(cfg, verifier, request, rounds), highlight=False, soft_wrap=True)


def newest_run(root: Path) -> Run:
    """The run that started last among those with a complete checkpoint."""
    complete = [p.parent.parent.parent for p in root.glob("*/checkpoints/best/draft.json")]
    if not complete:
        raise ValueError(
            f"no complete run in {root}/; train one (python -m experiments.train), give run=<folder>, or take run=pretrained."
        )
    return Run.open(max(complete, key=lambda path: Run.open(path).manifest.started))


def readable(verifier: Verifier, rounds: Iterator[Round]) -> Iterator[tuple[Text, Round]]:
    """Each round's text, coloured. Characters that span tokens appear with the token that completes them."""
    ids: list[int] = []
    shown = ""
    for step in rounds:
        piece = Text()
        for i, token in enumerate(step.tokens):
            ids.append(token)
            text = verifier.tokenizer.decode(ids, skip_special_tokens=True)
            if text.endswith("\ufffd"):
                continue
            piece.append(text[len(shown) :], shade(i + 1) if i < step.accepted else "default")
            shown = text
        yield piece, step


def shade(position: int) -> str:
    return SHADES[min(position, len(SHADES)) - 1]


def last_line(cfg: DictConfig, verifier: Verifier, request: Request, rounds: Sequence[Round]) -> str:
    """Speed with speculation, and without when asked for."""
    real = [step for step in rounds if not step.prefill]
    tokens = sum(len(step.tokens) for step in rounds)
    seconds = sum(step.draft_ms + step.verify_ms for step in rounds) / 1000.0
    tau = 1.0 + sum(step.accepted for step in real) / max(1, len(real))
    line = f"[bold]{tokens / seconds:.1f} tokens/s[/bold] with the draft (tau {tau:.2f}, {tokens} tokens in {len(real)} rounds)"
    if not cfg.plain:
        return line
    began = time.perf_counter()
    ((_, answer),) = generate(verifier, [request], max_new_tokens=int(cfg.max_new_tokens), batch_size=1)
    plain = len(answer.token_ids) / (time.perf_counter() - began)
    emitted = [token for step in rounds for token in step.tokens]
    same = ""
    if cfg.temperature == 0:
        same = (
            "; same text"
            if emitted == answer.token_ids
            else "; texts part at a near-tie or a defect: see mode=lossless"
        )
    return f"{line}, [bold]{plain:.1f} tokens/s[/bold] without: {tokens / seconds / plain:.2f} x{same}"


if __name__ == "__main__":
    main()
