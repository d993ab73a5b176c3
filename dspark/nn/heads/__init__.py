"""Sequential heads by name. A new head is one file here, one line below and one YAML in `configs/head/`."""

from dspark.config import DraftConfig
from dspark.nn.heads.base import SequentialHead
from dspark.nn.heads.gated import GatedHead
from dspark.nn.heads.rnn import RnnHead
from dspark.nn.heads.vanilla import VanillaHead

HEADS: dict[str, type[SequentialHead]] = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RnnHead}


def build_head(config: DraftConfig) -> SequentialHead | None:
    """The configured head; None for `head: none`, which is plain DFlash."""
    if config.head == "none":
        return None
    return HEADS[config.head](
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        rank=config.markov_rank,
    )


__all__ = ["HEADS", "SequentialHead", "build_head"]
