"""Cells of a sweep in one process: what they share, that it changes nothing, and that nothing else stays."""

from __future__ import annotations

import gc
import shutil
import weakref
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import scipy.sparse
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dspark.data import batches
from dspark.data.features import FeatureCache
from dspark.data.responses import TokenSet
from dspark.data.synthetic import synthetic_cache, tiny_documents, tiny_verifier
from dspark.nn import backbone
from dspark.nn.draft import Draft
from dspark.runs import Run, load_draft
from dspark.training import DraftModule
from dspark.verifier import Verifier
from dspark.warm_start import factorise_bigrams, right_singular_vectors, start_from_bigrams
from experiments import sharing
from experiments.cli import CONFIGS
from experiments.sharing import Newest, Shared
from experiments.sweep import config_sha
from experiments.train import train
from tests.builders import random_draft

TINY = [
    "verifier=tiny",
    "draft.vocab_size=100",
    "draft.init=random",
    "draft.block_size=4",
    "head.rank=8",
    "trainer.seq_length=128",
    "trainer.anchors=16",
    "trainer.max_steps=3",
    "trainer.max_minutes=null",  # a time budget moves the learning rate with the clock
    "trainer.val_every=3",
    "trainer.val_documents=3",
    "trainer.log_every=1",
    "trainer.resident=true",
    "trainer.precision=32-true",
    "trainer.progress=false",
    "optimizer.warmup_steps=1",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("cache") / "tiny")


@pytest.fixture(scope="module")
def token_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stem = tmp_path_factory.mktemp("tokens") / "set"
    verifier = tiny_verifier()
    documents = tiny_documents(verifier, counts={"train": 12, "validation": 4, "test": 4})
    TokenSet.create(
        documents, verifier=verifier.info, command="tests", generation={}, dataset="tiny", skipped={}
    ).save(stem)
    return stem


@pytest.fixture
def sources(cache, token_set) -> dict[str, list[str]]:
    return {
        "cache": [f"data.cache={cache.path}"],
        "online": ["data.source=online", f"data.path={token_set}"],
    }


def configured(runs: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", [*TINY, f"runs={runs}", *overrides])


def outcome(run: Run) -> tuple[pd.DataFrame, dict[str, object], dict[str, torch.Tensor]]:
    """Metrics, results and weights of a run, without its name and times."""
    table = pd.read_parquet(run.path / "metrics.parquet").drop(columns="run_id")
    results = {k: v for k, v in run.manifest.results.items() if not k.endswith("_seconds")}
    return table, results, load_draft(run.checkpoint("best"), attention_backend="grouped")[0].state_dict()


def assert_equal(one: Run, other: Run) -> None:
    (metrics, results, weights), (metrics_2, results_2, weights_2) = outcome(one), outcome(other)
    pd.testing.assert_frame_equal(metrics, metrics_2, check_exact=True)
    assert results == results_2
    assert weights.keys() == weights_2.keys()
    assert all(torch.equal(weight, weights_2[name]) for name, weight in weights.items())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often features were opened, loaded and counted."""
    counted = {"opened": 0, "loaded": 0, "factorised": 0}

    def counting(name, function, *inputs, **options):
        counted[name] += 1
        return function(*inputs, **options)

    for name, where, what in (
        ("opened", sharing, "open_features"),
        ("loaded", batches, "ResidentFeatures"),
        ("factorised", sharing, "factorise_bigrams"),
    ):
        monkeypatch.setattr(where, what, partial(counting, name, getattr(where, what)))
    return counted


@pytest.mark.parametrize("source", ["cache", "online"])
def test_cells_that_share_equal_separate_runs(sources, source, tmp_path, calls):
    cells = [
        ["draft.block_size=4", "seed=0"],
        ["draft.block_size=6", "seed=1"],
        ["+ablation=no_markov", "head.rank=0", "trainer.val_documents=4"],
    ]
    shared = Shared()
    together = [train(configured(tmp_path / "a", *sources[source], *cell), shared) for cell in cells]
    assert calls == {"opened": 1, "loaded": 1, "factorised": 1}
    apart = [train(configured(tmp_path / "b", *sources[source], *cell)) for cell in cells]
    assert calls["opened"] == calls["loaded"] == 4
    for one, other in zip(together, apart, strict=True):
        assert_equal(one, other)


def test_later_cells_need_no_verifier(sources, tmp_path, monkeypatch):
    start = ["draft.init=verifier_layers", "trainer.val_every=1"]
    cells = [["seed=0"], ["seed=1", "draft.block_size=6"]]
    shared, captured, whole = Shared(), [0], Verifier.capture

    def counting(self, *inputs, **options):
        captured[-1] += 1
        return whole(self, *inputs, **options)

    monkeypatch.setattr(Verifier, "capture", counting)
    for resident in ("true", "false"):
        together = []
        for cell in cells:
            captured.append(0)
            options = [*sources["online"], *start, *cell, f"trainer.resident={resident}"]
            together.append(train(configured(tmp_path / "a", *options), shared))
        # Rows that are not resident are captured when they come up; validation, start and test documents are not, in either.
        assert captured[-1] == (0 if resident == "true" else 3)
        assert captured[-2] > captured[-1]
        assert_equal(together[-1], train(configured(tmp_path / "b", *options)))
        shared = Shared()


def test_what_features_depend_on_opens_them_again(sources, cache, tmp_path, tmp_path_factory, calls):
    elsewhere = shutil.copytree(cache.path, tmp_path_factory.mktemp("moved") / "tiny")
    shared, cached = Shared(), sources["cache"]
    for overrides, expected in (  # opened, loaded, factorised
        ([*cached, "seed=0"], (1, 1, 1)),
        ([*cached, "seed=1", "trainer.anchors=8", "optimizer.lr=1e-3"], (1, 1, 1)),
        ([*cached, "draft.vocab_size=90"], (1, 1, 2)),
        ([*cached, "draft.vocab_size=90", "draft.taps=[1,3]"], (1, 2, 2)),
        ([*cached, "draft.vocab_size=90", "draft.taps=[1,3]", "head.rank=4"], (1, 2, 3)),
        ([*cached, "+data.seed=1"], (2, 3, 4)),
        ([f"data.cache={elsewhere}"], (3, 4, 5)),
        (sources["online"], (4, 5, 6)),
    ):
        train(configured(tmp_path, "test=false", *overrides), shared)
        assert tuple(calls.values()) == expected, overrides


def test_one_value_is_held_and_dropped_before_the_next_is_made():
    class Value:
        pass

    derived = Newest()
    newest = Newest(derived)
    first = weakref.ref(newest.get("a", Value))
    assert newest.get("a", lambda: pytest.fail("made again")) is first()
    derived.get("b", Value)

    def make() -> Value:
        gc.collect()
        assert first() is None
        return Value()

    newest.get("c", make)
    assert derived.value is None
    with pytest.raises(ZeroDivisionError):
        newest.get("d", lambda: 1 / 0)
    assert newest.value is None
    assert isinstance(newest.get("c", Value), Value)


def test_nothing_that_was_trained_outlives_its_cell(sources, tmp_path, monkeypatch):
    alive: list[weakref.ref] = []
    for kind in (DraftModule, Draft, torch.optim.AdamW):
        whole = kind.__init__

        def init(self, *inputs, _whole=whole, **options):
            alive.append(weakref.ref(self))
            _whole(self, *inputs, **options)

        monkeypatch.setattr(kind, "__init__", init)
    shared = Shared()
    train(configured(tmp_path, *sources["cache"]), shared)
    assert len(alive) >= 4  # the module, its draft, the optimizer, and the draft that replays the test split
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


# ---- bigrams


@pytest.fixture
def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counted pairs of 120 tokens, of which 20 never come first, and 60 followers."""
    generator = torch.Generator().manual_seed(0)
    pair = torch.randperm(100 * 60, generator=generator)[:900]
    return pair // 60, pair % 60, torch.randint(1, 40, (900,), generator=generator)


def test_a_full_rank_table_gives_the_smoothed_bigrams(pairs):
    prev, following, counts = pairs
    factors = factorise_bigrams(*pairs, rows=120, columns=60, rank=60)
    unigram = torch.zeros(60).index_add_(0, following, counts.float()) + 0.5
    unigram /= unigram.sum()
    wanted = unigram.log().expand(120, 60).clone()
    wanted[prev, following] += torch.log1p(counts / unigram[following])
    found = factors.previous @ factors.following.T
    seen = factors.seen
    assert int(seen.sum()) == len(prev.unique()) < 120
    # One of the 60 directions has no rank left: the first rank is the prior's.
    dense = wanted - unigram.log()
    scaled = dense * torch.zeros(120).index_add_(0, prev, counts.float()).sqrt()[:, None]
    basis = torch.linalg.svd(scaled[seen], full_matrices=False).Vh[:59].T
    projected = unigram.log() - unigram.log().mean() + dense[seen] @ basis @ basis.T
    torch.testing.assert_close(found[seen], projected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 5, 12])
def test_singular_vectors_are_those_of_a_dense_decomposition(count):
    matrix = scipy.sparse.random(40, 30, density=0.3, rng=0, format="csr")
    found = torch.from_numpy(right_singular_vectors(matrix, count))
    wanted = torch.linalg.svd(torch.from_numpy(matrix.toarray())).Vh[:count].flip(0).T
    torch.testing.assert_close(found * (found * wanted).sum(0).sign(), wanted, rtol=1e-8, atol=1e-8)


def test_a_head_begins_with_the_factors_and_noise_for_tokens_never_seen(pairs):
    draft = random_draft()
    rows, columns, rank = draft.config.vocab_size, draft.config.draft_vocab_size, draft.config.markov_rank
    prev, following, counts = (t[(pairs[0] < rows // 2) & (pairs[1] < columns)] for t in pairs)
    factors = factorise_bigrams(prev, following, counts, rows=rows, columns=columns, rank=rank)
    noise, norm = draft.markov_head.markov_w1.weight.detach().clone(), draft.norm.weight.detach().clone()
    start_from_bigrams(draft, factors, backbone_scale=0.3)
    table = draft.markov_head.markov_w1.weight
    assert torch.equal(table[factors.seen], factors.previous[factors.seen])
    assert torch.equal(table[~factors.seen, 1:], 0.01 * noise[~factors.seen, 1:])
    assert torch.equal(draft.markov_head.markov_w2.weight, factors.following)
    assert torch.equal(draft.norm.weight, 0.3 * norm)


# ---- compiled regions


def test_a_region_compiles_for_more_shapes_than_the_compiler_allows(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = backbone._compiled.__wrapped__(_silu_product)
    for n in range(1, 13):
        x = torch.randn(n, 4, requires_grad=True)
        torch.testing.assert_close(compiled(x), _silu_product(x))


def _silu_product(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ x.mT).sum()


# ---- the grid of configs/experiment/gpu_claims.yaml


def test_the_claims_on_a_gpu_expand_to_their_cells():
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        params = compose("train", ["experiment=gpu_claims"], return_hydra_config=True).hydra.sweeper.params
        typed = ["experiment=gpu_claims", *(f"{k}={v}" for k, v in params.items())]
        (expanded,) = BasicSweeper.split_arguments(
            OverridesParser.create().parse_overrides(typed), max_batch_size=None
        )
        assert [cell[-1] for cell in expanded] == ["seed=0", "seed=1", "seed=2"] * 15
        cells = [compose("train", list(cell)) for cell in expanded[::3]]
    assert len({config_sha(cell) for cell in cells}) == 15
    assert {(c.draft.block_size, c.head.rank) for c in cells} == {(b, r) for b in (4, 8, 16) for r in (0, 64)}
    assert {c.draft.num_layers for c in cells} == {1, 2, 5}
    assert {c.loss.decay_gamma for c in cells} == {2.0, 4.0, 8.0, None}
    terms = {frozenset(k for k, v in c.loss.terms.items() if v) for c in cells}
    assert terms == {frozenset(t) for t in (["ce", "tv"], ["ce"], ["tv"], ["kl"], ["lk_hybrid"])}
    fixed = [
        (c.trainer.accelerator, c.trainer.resident, c.trainer.max_steps, c.trainer.max_minutes) for c in cells
    ]
    assert set(fixed) == {("gpu", True, 1000, None)}
    assert {(c.data.source, c.verifier.device, c.draft.taps) for c in cells} == {("online", "cuda", None)}
    assert len({str(OmegaConf.to_container(c.data)) for c in cells}) == 1
