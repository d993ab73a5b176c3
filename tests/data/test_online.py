"""Features captured on demand: the numbers of a cache, without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dspark.data import online as online_module
from dspark.data.batches import PackedRows
from dspark.data.capture import length_batches
from dspark.data.features import FeatureCache, Features
from dspark.data.online import OnlineFeatures
from dspark.data.responses import TokenDocument
from dspark.data.synthetic import synthetic_cache, tiny_documents, tiny_manifest, tiny_verifier
from dspark.runs import Run
from dspark.verifier import Verifier
from experiments import collect
from experiments.cli import CONFIGS
from experiments.train import train
from tests.test_training import TINY

COUNTS = {"train": 16, "validation": 6, "test": 6}
BATCH = 1024  # of `synthetic_cache`


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier()


@pytest.fixture(scope="module")
def documents(verifier: Verifier) -> list[TokenDocument]:
    return tiny_documents(verifier, counts=COUNTS, max_new_tokens=24, seed=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, verifier: Verifier) -> FeatureCache:
    return synthetic_cache(tmp_path_factory.mktemp("online") / "cache", verifier=verifier, counts=COUNTS)


def online(
    verifier: Verifier, documents: Sequence[TokenDocument], *, tokens_per_batch: int = BATCH
) -> OnlineFeatures:
    lengths = [len(d.input_ids) for d in documents]
    order = [i for batch in length_batches(lengths, tokens_per_batch=BATCH, seed=0) for i in batch]
    return OnlineFeatures(
        Path("set"),
        tiny_manifest(verifier),
        verifier,
        [documents[i] for i in order],
        tokens_per_batch=tokens_per_batch,
    )


def rows_of(features: Features) -> PackedRows:
    return PackedRows(
        features, features.select(split="train"), seq_length=128, anchors=16, seed=0, dtype=torch.bfloat16
    )


def test_it_reads_as_the_cache_of_the_same_documents_does(verifier, documents, cache):
    features = online(verifier, documents)
    assert len(features) == len(cache)
    assert [features.info(i) for i in range(len(cache))] == [cache.info(i) for i in range(len(cache))]
    assert features.contract() == cache.contract()
    for name in ("documents", "tokens", "supervised_tokens", "splits", "domains", "prompts_sha"):
        assert getattr(features.manifest, name) == getattr(cache.manifest, name), name
    assert features.select(split="test", temperature=0.0) == cache.select(split="test", temperature=0.0)
    assert features.greedy_first("validation") == cache.greedy_first("validation")
    ours, theirs = features.verifier_weights(), cache.verifier_weights()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for a, b in zip(features.tokens(3), cache.tokens(3), strict=True):
        assert torch.equal(a, b)


def test_the_same_batches_give_the_same_bits(verifier, documents, cache):
    features = online(verifier, documents)
    features.hold(range(len(features)))  # in batches of all documents, as the cache was captured
    for number in range(len(cache)):
        for name in ("input_ids", "loss_mask", "aux", "last", "lse"):
            assert torch.equal(getattr(features[number], name), getattr(cache[number], name)), (number, name)


def test_other_batches_differ_by_rounding_only(verifier, documents, cache):
    features = online(verifier, documents, tokens_per_batch=150)
    for number in (0, 7, len(cache) - 1):
        for name in ("aux", "last", "lse"):
            a, b = getattr(features[number], name).float(), getattr(cache[number], name).float()
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_fewer_layers_are_captured_as_a_cache_would_leave_them_out(verifier, documents, cache):
    features = online(verifier, documents)
    narrow = features.with_taps([1, 3])
    assert narrow.manifest.aux_layer_ids == (1, 3)
    assert torch.equal(narrow[5].aux, features[5].aux[:, [0, 2]])
    assert features.with_taps([1, 2, 3]) is features
    with pytest.raises(
        ValueError, match=r"\[2, 4\] cannot be read from token set set, which holds \[1, 2, 3\]"
    ):
        features.with_taps([2, 4])


@pytest.mark.parametrize("resident", [True, False])
def test_training_rows_are_those_of_the_cache(verifier, documents, cache, resident):
    read, captured = rows_of(cache), rows_of(online(verifier, documents))
    if resident:
        captured.make_resident("cpu")
    for index in range(2 * read.rows_per_epoch):
        ours, theirs = captured[index], read[index]
        for name, tensor in vars(theirs).items():
            found = getattr(ours, name)
            if name in ("aux", "last", "lse"):
                torch.testing.assert_close(found.float(), tensor.float(), rtol=2**-7, atol=2**-7)
            else:
                assert torch.equal(found, tensor), name


def test_resident_rows_need_no_verifier_and_held_documents_neither(verifier, documents, monkeypatch):
    features = online(verifier, documents)
    rows, held = rows_of(features), features.select(split="validation")
    rows.make_resident("cpu", held)
    monkeypatch.setattr(Verifier, "capture", lambda *_, **__: pytest.fail("captured again"))
    assert rows[0].aux.abs().sum() > 0
    assert features[held[0]].last.abs().sum() > 0


@pytest.mark.parametrize("room", [1, 2, 3])
def test_documents_read_again_are_captured_once_while_there_is_room(verifier, documents, monkeypatch, room):
    plain = online(verifier, documents)
    expected = [plain._captured([number])[0] for number in range(3)]
    sizes = [d.aux.nbytes + d.last.nbytes + d.lse.nbytes for d in expected]
    monkeypatch.setattr(online_module, "KEPT_BYTES", sum(sizes[:room]))
    features, captured, whole = online(verifier, documents), [], OnlineFeatures._captured

    def counting(self, numbers):
        captured.extend(numbers)
        return whole(self, numbers)

    monkeypatch.setattr(OnlineFeatures, "_captured", counting)
    for _ in range(2):
        for number, wanted in enumerate(expected):
            found = features[number]
            assert all(
                torch.equal(getattr(found, name), getattr(wanted, name))
                for name in ("input_ids", "loss_mask", "aux", "last", "lse")
            )
    assert captured == [0, 1, 2, *range(room, 3)]
    features.with_taps([1, 3])[0]
    assert captured[-1] == 0  # other layers are other states


def test_progress_counts_every_training_token(verifier, documents):
    features = online(verifier, documents, tokens_per_batch=200)
    seen: list[int] = []

    class Shown:
        def __init__(self, label: str, total: int) -> None:
            self.total = total

        def __enter__(self):
            return seen.append

        def __exit__(self, *_: object) -> None:
            assert sum(seen) == self.total

    features.progress = Shown
    rows_of(features).make_resident("cpu")
    assert len(seen) > 1
    assert sum(seen) == sum(features.info(d).tokens for d in features.select(split="train"))


@pytest.mark.parametrize("resident", [True, False])
def test_states_that_are_no_numbers_are_left_out_and_counted(verifier, documents, resident, monkeypatch):
    features = online(verifier, documents)
    rows = rows_of(features)
    sound, bad = rows[0], rows.rows(0)[0][0]
    stray = features.tokens(bad)[0]
    whole = Verifier.capture

    @torch.inference_mode()
    def capture(self, input_ids, **options):
        states = whole(self, input_ids, **options)
        for b, row in enumerate(input_ids):
            if torch.equal(row[: len(stray)], stray):
                states.aux[b, 1, 0, 0] = float("inf")
        return states

    monkeypatch.setattr(Verifier, "capture", capture)
    if resident:
        rows.make_resident("cpu")
    batch = rows[0]
    assert rows.bad_documents == 1
    assert batch.aux.isfinite().all()
    assert int(batch.loss_mask.sum()) == int(sound.loss_mask.sum()) - features.info(bad).response_tokens
    with pytest.raises(
        ValueError, match=r"gives NaN or infinite hidden states .* verifier\.compute_dtype=float32"
    ):
        features[bad]


def test_documents_count_once_and_must_fit_the_set(verifier, documents):
    assert len(online(verifier, [*documents, documents[3]])) == len(documents)
    train = next(d for d in documents if d.split == "train")
    with pytest.raises(ValueError, match="is in the splits 'train' and 'test'"):
        online(verifier, [train, replace(train, split="test", temperature=0.5)])
    masked = replace(train, input_ids=(6, *train.input_ids[1:]))
    with pytest.raises(ValueError, match="contains the mask token 6"):
        online(verifier, [masked])


# ---- the command


PROMPTS = (
    "data=templates",
    "data.counts={train: 12, validation: 4, test: 4}",
    "data.self_counts={train: 0, validation: 0, test: 0}",
    "data.responses.max_new_tokens=12",
    "data.responses.sampled_share=0.0",
)


def configured(*overrides: str, data: tuple[str, ...] = PROMPTS) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=CONFIGS):
        return compose("train", [*TINY, *data, *overrides])


def losses_of(run: Run) -> list[float]:
    table = pd.read_parquet(run.path / "metrics.parquet")
    loss = table[table["name"] == "loss"].set_index("step").sort_index()
    return (loss["total"] / loss["count"]).tolist()


@pytest.fixture
def in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_fresh_folder")
def test_training_online_gives_the_metrics_of_training_from_a_cache(tmp_path):
    started = train(configured("data.source=online", "trainer.resident=true"))
    assert (tmp_path / "data/cache/tiny-templates/responses.npz").is_file()
    assert not list(tmp_path.glob("data/cache/**/*.safetensors")), "no hidden state was written"
    assert started.manifest.data["token_set"] == "data/cache/tiny-templates/responses"
    assert "cache" not in started.manifest.data
    drawn = train(configured("data.source=online", "label=drawn"))
    cached = train(configured("label=cached"))
    assert cached.manifest.data["cache"] == "data/cache/tiny-templates"
    for run in (started, drawn):
        assert losses_of(run) == pytest.approx(losses_of(cached), rel=1e-3)
        for name in ("tau", "accepted", "validation_tau"):
            assert run.manifest.results[name] == pytest.approx(cached.manifest.results[name], rel=1e-3)


@pytest.mark.usefixtures("in_a_fresh_folder")
def test_an_online_run_starts_from_the_verifier_that_captures(monkeypatch):
    loaded: list[Verifier] = []
    load = collect.load_verifier
    monkeypatch.setattr(collect, "load_verifier", lambda cfg: loaded.append(load(cfg)) or loaded[-1])
    run = train(configured("data.source=online", "draft.init=verifier_layers", "trainer.max_steps=2"))
    assert run.manifest.status == "complete"
    assert len(loaded) == 1


FOREIGN = [
    "data.format=vllm",
    "data.path=x",
    "data.layer_ids=[1,4]",
    "data.responses_by=x",
    "data.temperature=0",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.source=onlin"], "data.source is 'onlin'; expected cache or online"),
        (["data.source=online", "trainer.num_workers=2"], r"trainer\.num_workers is 2, set it to 0"),
        (["data.source=online", "data.cache=somewhere"], "data.cache=somewhere names a cache"),
        (["data.source=online"], "holds answers of 'smollm2', not of 'tiny-llama'"),
        (["data=foreign", "data.source=online", *FOREIGN], "holds hidden states that another tool captured"),
    ],
)
def test_mistakes_are_named_before_capturing(overrides, message):
    with pytest.raises(ValueError, match=message):
        train(configured(*overrides, data=()))
