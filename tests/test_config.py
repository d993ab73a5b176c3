"""Draft configurations refuse what no draft can be; contracts name every difference."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dspark.config import Contract, DraftConfig
from tests.builders import draft_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "even number"),
        ({"draft_vocab_size": 98}, "expected 1 to 97"),
        ({"block_size": 1}, "at least 2"),
        ({"mask_token_id": 97}, "outside the verifier's 97"),
        ({"aux_layer_ids": (2, 1)}, "strictly increasing"),
        ({"aux_layer_ids": (0, 1)}, "0 is the embedding"),
        ({"aux_layer_ids": (1, 6)}, "6 the last layer"),
        ({"layer_types": ("full_attention",)}, "expected 2 entries"),
        ({"layer_types": ("sliding_attention",) * 2}, "positive window"),
        ({"head": "markov"}, "expected one of"),
        ({"head": "none"}, "head=none"),
        ({"markov_rank": 0}, "positive rank"),
        ({"head": "none", "markov_rank": 0}, "use_prev_embedding=false"),
    ],
)
def test_impossible_configurations_say_why(changes, message):
    with pytest.raises(ValueError, match=message):
        draft_config(**changes)


def test_proposals_follow_the_layout():
    assert draft_config(block_size=8).num_proposals == 7
    assert draft_config(block_size=8, sample_from_anchor=True).num_proposals == 8
    assert draft_config(block_size=1, sample_from_anchor=True).num_proposals == 1


def test_configuration_survives_json_and_names_foreign_keys():
    config = draft_config()
    assert DraftConfig.from_dict(json.loads(config.to_json())) == config
    values = dataclasses.asdict(config)
    values["gamma"] = values.pop("head_dim")
    with pytest.raises(ValueError, match=r"unknown keys \['gamma'\], missing keys \['head_dim'\]"):
        DraftConfig.from_dict(values)


def test_contracts_compare_what_both_fix_and_list_both_values():
    cache = Contract(mask_token_id=16, aux_layer_ids=(2, 9), verifier_sha="abc")
    draft = Contract(mask_token_id=17, aux_layer_ids=[2, 9], block_size=8)
    assert cache.differences(draft) == {"mask_token_id": (16, 17)}
    with pytest.raises(ValueError, match="mask_token_id: 16 in cache, 17 in draft"):
        cache.check(draft, mine="cache", theirs="draft")
    cache.check(draft, mine="cache", theirs="draft", ignore=("mask_token_id",))
