"""Two-tower training: its gradient, its negatives, and runs that stop and go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import problems
import pytest
import runs
import torch
import two_towers
from click.testing import CliRunner
from contrastive import dense_loss

from xmlc.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from xmlc.cli import main
from xmlc.config import Config, dump_config, load_config
from xmlc.data import Dataset, TextColumn
from xmlc.errors import CheckpointError, ConfigError, DataError
from xmlc.evaluation import load
from xmlc.evaluation.predict import Predictor
from xmlc.evaluation.run import evaluate_predictor
from xmlc.nn import TwoTower, approximate
from xmlc.training import trainer
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import Prepared, prepare
from xmlc.training.trainer import StoppedBySignalError, train_into
from xmlc.training.two_tower import mine, pool_of, two_tower_step

Ways = Callable[[str], Config]
WAYS = ("words", "transformer", "frozen")
MINED = {"mined_negatives": 2, "mined_from": 5, "random_negatives": 3, "refresh_epochs": 2}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def config(encoder: Path) -> Callable[..., Config]:
    def call(way: str, **sections: dict[str, Any]) -> Config:
        return two_towers.config(None if way == "words" else encoder, way == "frozen", **sections)

    return call


def made(dataset: Dataset, config: Config, encoder: Path | None = None) -> tuple[TwoTower, Prepared]:
    prepared = prepare(dataset, config, encoder=encoder)
    text_encoder = prepared.text_encoder
    transformer = text_encoder.transformer if text_encoder is not None and config.encoder.trained else None
    model = TwoTower(config, prepared.problem, transformer)
    model.texts = prepared.label_texts
    return model, prepared


def evaluated(predictor: Predictor, dataset: Dataset) -> dict[str, float]:
    report = evaluate_predictor(predictor, dataset, **runs.WHOLE)
    return report["metrics"]


# ---- learning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_it_learns_and_predicts(way: str, config: Callable[..., Config], tmp_path: Path) -> None:
    dataset = two_towers.dataset()
    settings = config(way, training={"epochs": 12}, two_tower={"mined_negatives": 2})
    train_into(tmp_path / "run", dataset, settings)
    predictor = load(tmp_path / "run")
    assert evaluated(predictor, dataset)["P@1"] > (0.3 if way == "frozen" else 0.7)  # chance is 0.08
    if way != "frozen":
        [best], nothing = predictor.predict(["word15 word16 word17", ""], k=1)
        assert best.name == "label 5"
        assert -1.0 <= best.score <= 1.0 + 1e-6
        assert len(nothing) == 1


@pytest.mark.parametrize("way", ["words", "transformer"])
@pytest.mark.parametrize("mini_batch_size", [0, 5])
@pytest.mark.parametrize("kind", ["decoupled_softmax", "sigmoid"])
def test_the_steps_gradient_is_that_of_the_dense_formula(
    kind: str, mini_batch_size: int, way: str, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = two_towers.dataset(filtered=True)
    # Without the transformer's own dropout, which the formula knows nothing of.
    folder = (
        None
        if way == "words"
        else encoders.write(
            encoder.parent / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )
    settings = two_towers.config(
        folder,
        two_tower={
            "loss": kind,
            "mini_batch_size": mini_batch_size,
            "random_negatives": 4,
            "projection": 32,
            "bias": -0.5,
            "learn_scale": True,
        },
    )
    model, prepared = made(dataset, settings, folder)
    for part in (model.encoder, model.projection, model.loss):
        part.double()
    monkeypatch.setattr("xmlc.nn.encoder._values", lambda rows: torch.from_numpy(rows.values).double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # pooling is in float32 otherwise
    batch = next(prepared.train.epoch(0))
    pool = pool_of(model, batch, 1)
    assert pool.ignored.indices.size and pool.positives.indices.size

    optimizers = Optimizers(model)
    monkeypatch.setattr(optimizers, "step_encoder", lambda: None)
    loss = two_tower_step(model, batch, optimizers, 1, 0.0, Stopwatch())
    parameters = [each for each in optimizers.parameters() if each.grad is not None]
    found = [each.grad.to_dense() for each in parameters if each.grad is not None]
    for each in parameters:
        each.grad = None
    assert model.texts is not None
    pool_rows = model.texts.take(pool.labels.numpy())
    truth = dense_loss(
        # With a generator, as without one a transformer embeds without a graph; nothing is dropped.
        *(model.embed(rows, torch.Generator()) for rows in (batch.features, pool_rows)),
        torch.from_numpy(pool.positives.to_scipy().toarray()) > 0,
        kind,
        model.loss.log_scale.exp(),
        model.loss.bias,
        torch.from_numpy(pool.ignored.to_scipy().toarray()) > 0,
    )
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-10, atol=0)
    truth.backward()
    assert len(parameters) >= (3 if kind == "decoupled_softmax" else 4)
    for ours, parameter in zip(found, parameters, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(ours, parameter.grad.to_dense(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("way", ["words", "transformer"])
def test_dropout_in_mini_batches_is_that_of_the_first_pass(
    way: str, config: Callable[..., Config], encoder: Path
) -> None:
    """Mini-batches of a whole batch give the bits of the single graph, if their dropout is the same."""
    steps = []
    for size in (0, 64):
        settings = config(way, model={"input_dropout": 0.5}, two_tower={"mini_batch_size": size})
        model, prepared = made(two_towers.dataset(), settings, encoder)
        two_tower_step(model, next(prepared.train.epoch(0)), Optimizers(model), 1, 0.1, Stopwatch())
        steps.append({name: value.clone() for name, value in model.tensors().items()})
    for name, value in steps[0].items():
        torch.testing.assert_close(value, steps[1][name], rtol=1e-5, atol=1e-7)


# ---- negatives -------------------------------------------------------------------------------------------


def test_a_pool_holds_positives_and_mined_negatives_and_no_filter_pair_counts() -> None:
    dataset = two_towers.dataset(filtered=True)
    model, prepared = made(dataset, two_towers.config(two_tower={**MINED, "positives": 2}))
    mined = mine(model, prepared.train)
    batch = next(replace(prepared.train, negatives=mined).epoch(0))
    pool = pool_of(model, batch, 7)
    assert dataset.train.filter_pairs is not None
    known = dataset.train.labels.without(dataset.train.filter_pairs)
    for row, instance in enumerate(batch.instances):
        positives, filtered = (
            set(each.take(np.array([instance])).indices.tolist())
            for each in (known, dataset.train.filter_pairs)
        )
        in_pool = set(pool.labels.tolist())
        marked = {int(pool.labels[place]) for place in pool.positives.take(np.array([row])).indices}
        ignored = {int(pool.labels[place]) for place in pool.ignored.take(np.array([row])).indices}
        assert marked == positives & in_pool
        assert len(marked) >= min(2, len(positives))
        assert ignored == filtered & in_pool
    again = pool_of(model, batch, 7)
    assert torch.equal(pool.labels, again.labels)
    assert not torch.equal(pool.labels, pool_of(model, batch, 8).labels)


def test_mined_labels_are_the_nearest_that_are_no_positives_and_no_filter_pairs() -> None:
    dataset = two_towers.dataset(filtered=True)
    model, prepared = made(dataset, two_towers.config(two_tower=MINED))
    mined = mine(model, prepared.train)
    assert dataset.train.filter_pairs is not None
    stream = prepared.train
    assert not isinstance(stream.features, np.ndarray)
    embeddings = model.embed_labels().double()
    for instance in range(dataset.train.instances):
        row = np.array([instance])
        found = mined.take(row).indices.tolist()
        if instance not in stream.rows:
            assert found == []
            continue
        with torch.no_grad():
            scores = embeddings @ model.embed(stream.features.take(row))[0].double()
        out = {*stream.labels.take(row).indices.tolist()}
        out |= {*dataset.train.filter_pairs.take(row).indices.tolist()}
        rest = sorted(set(range(dataset.label_count)) - out, key=lambda label: -float(scores[label]))
        assert len(found) == 5
        assert min(float(scores[label]) for label in found) >= float(scores[rest[4]]) - 1e-6
        assert not out & set(found)


def test_an_index_mines_what_exact_search_does_where_it_looks_at_all_lists() -> None:
    dataset = two_towers.dataset(filtered=True)
    found = []
    for search in ("exact", "approximate"):
        settings = MINED | {"mining_search": search, "mining_probes": 100}
        model, prepared = made(dataset, two_towers.config(two_tower=settings))
        found.append(mine(model, prepared.train).to_scipy())
    assert found[0].nnz > 0
    assert (found[0] != found[1]).nnz <= 4  # ties within rounding


def test_training_with_an_index_needs_its_package_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    approximate.faiss.cache_clear()
    settings = two_towers.config(two_tower=MINED | {"mining_search": "approximate"})
    with pytest.raises(ConfigError, match="needs the package of the extra `search`, found none"):
        train_into(tmp_path / "run", two_towers.dataset(), settings)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    # Nothing is mined: nothing is needed.
    train_into(
        tmp_path / "run",
        two_towers.dataset(40),
        two_towers.config(two_tower={"mining_search": "approximate"}, training={"epochs": 1}),
    )


def test_negatives_are_mined_again_every_few_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[int] = []

    def counting(model: TwoTower, *others: Any) -> Any:
        epochs.append(len(epochs))
        return mine(model, *others)

    monkeypatch.setattr(trainer, "mine", counting)
    settings = two_towers.config(two_tower=MINED, training={"epochs": 5})
    train_into(tmp_path / "run", two_towers.dataset(60), settings)
    assert len(epochs) == 3


# ---- evaluation ------------------------------------------------------------------------------------------


def test_evaluation_equals_brute_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmlc.nn.nearest.KEYS_AT_ONCE", 7)
    dataset = two_towers.dataset(filtered=True)
    train_into(tmp_path / "run", dataset, two_towers.config(training={"epochs": 2}))
    predictor = load(tmp_path / "run")
    assert dataset.test is not None and dataset.test.texts is not None
    assert dataset.test.filter_pairs is not None
    scores = predictor.embed(list(dataset.test.texts)).astype(np.float64) @ predictor.embed(
        two_towers.label_texts()
    ).T.astype(np.float64)
    truth = dataset.test.labels.to_scipy().toarray() > 0
    scores[dataset.test.filter_pairs.to_scipy().toarray() > 0] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    inverse = predictor.model.problem.inverse_propensity
    hits = np.take_along_axis(truth, order, 1)
    metrics = evaluated(predictor, dataset)
    assert metrics["P@1"] == pytest.approx(hits[:, 0].mean())
    assert metrics["P@5"] == pytest.approx(hits.mean())
    gained = (hits * inverse[order]).sum(1)
    best = [np.sort(inverse[row])[::-1][:5].sum() for row in truth]
    assert metrics["PSP@5"] == pytest.approx(gained.sum() / np.sum(best))


def test_labels_added_after_training_are_predicted_from_their_texts(tmp_path: Path) -> None:
    dataset = two_towers.dataset()
    train_into(tmp_path / "run", dataset, two_towers.config(training={"epochs": 4}))
    predictor = load(tmp_path / "run")
    texts = ["word15 word16 word17 word90", "word3 word90"]
    extended = predictor.with_labels(texts, names=["new", "newer"])
    [ranked] = extended.predict(["word15 word16 word17 word90"], k=3)
    assert ranked[0].name == "new"
    assert ranked[0].label == dataset.label_count
    assert ranked[0].score == pytest.approx(1.0, abs=1e-5)
    assert predictor.model.problem.label_count == dataset.label_count
    assert len(predictor.predict(["word15"], k=100)[0]) == dataset.label_count
    np.testing.assert_allclose(
        predictor.top_labels(["word15 word4"], 1)[0], extended.top_labels(["word15 word4"], 1)[0], rtol=1e-5
    )
    assert extended.with_labels(["word7"]).label_name(dataset.label_count + 2) == "word7"
    for given in ([], ["one"]):
        with pytest.raises(DataError, match="must be at least one text, and a name for each"):
            predictor.with_labels(given, names=["a", "b"])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda value: value[:-1], r"must be torch.float32 \[24, 32\], found torch.float32 \[23, 32\]"),
        (lambda value: value[:, 1:], r"found torch.float32 \[24, 31\]"),
        (lambda value: value.double(), r"found torch.float64 \[24, 32\]"),
        (lambda value: value.log(), "must be finite, found NaN or infinity"),
    ],
)
def test_label_embeddings_that_do_not_fit_their_checkpoint_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], found: str, tmp_path: Path
) -> None:
    train_into(tmp_path / "run", two_towers.dataset(), two_towers.config(training={"epochs": 1}))
    path = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert path is not None
    saved = read_checkpoint(path)
    embeddings = change(saved.tensors["label_embeddings"]).contiguous()
    write_checkpoint(path, {**saved.tensors, "label_embeddings": embeddings}, saved.metadata)
    with pytest.raises(CheckpointError, match=found):
        load(tmp_path / "run")


def test_a_predictor_with_an_index_ranks_nearly_as_all_labels_do(tmp_path: Path) -> None:
    dataset = two_towers.dataset()
    train_into(tmp_path / "run", dataset, two_towers.config(training={"epochs": 2}))
    predictor = load(tmp_path / "run")
    indexed = predictor.with_index(probes=1)
    texts = [f"word{3 * label} word{3 * label + 1}" for label in range(dataset.label_count)]
    for each, exact in (
        (indexed, predictor),
        (indexed.with_labels(["word7"]), predictor.with_labels(["word7"])),
    ):
        scores, labels = each.top_labels(texts, 3)
        truth = exact.top_labels(texts, 3)
        np.testing.assert_allclose(scores, truth[0], atol=1e-5)
        assert (labels == truth[1]).mean() > 0.9
    assert predictor.model.index is None and isinstance(indexed.model, TwoTower)
    assert indexed.with_labels(["word7"]).predict(["word7"], k=1)[0][0].label == dataset.label_count
    for probes in (0, 1.5, True):
        with pytest.raises(ConfigError, match="with_index: probes must be an integer of at least 1, found"):
            predictor.with_index(probes)  # type: ignore[arg-type]


def test_a_checkpoint_within_an_epoch_embeds_the_labels_when_it_is_loaded(
    tmp_path: Path, stop_at: Callable[[int, Callable[[], None]], None]
) -> None:
    stop_at(3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train_into(tmp_path / "run", two_towers.dataset(), two_towers.config())
    predictor = load(tmp_path / "run")
    assert isinstance(predictor.model, TwoTower)
    assert predictor.model.embeddings is None
    assert len(predictor.predict(["word3"], k=2)[0]) == 2


def test_the_command_line_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=60)
    lines = "".join(
        f'{{"title": "label {number}", "content": "{text}"}}\n'
        for number, text in enumerate(two_towers.label_texts())
    )
    (data / "lbl.json").write_text(lines)
    (tmp_path / "config.toml").write_text(dump_config(two_towers.config(training={"epochs": 3})))
    run = str(tmp_path / "run")
    for arguments in (
        ["train", str(data), "--out", run, "--config", str(tmp_path / "config.toml")],
        ["eval", run],
        ["predict", run, str(data / "lbl.json"), "-k", "1"],
        ["report", run],
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output


# ---- the same bits ---------------------------------------------------------------------------------------


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something while a step of the next training is under way, once."""

    def arrange(chosen: int, act: Callable[[], None]) -> None:
        def acting(model: Any, batch: Any, optimizers: Any, step: int, *others: Any) -> Any:
            if step == chosen:
                monkeypatch.setattr(trainer, "two_tower_step", two_tower_step)
                act()
            return two_tower_step(model, batch, optimizers, step, *others)

        monkeypatch.setattr(trainer, "two_tower_step", acting)

    return arrange


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_goes_on_to_the_same_bits(
    way: str,
    config: Callable[..., Config],
    tmp_path: Path,
    stop_at: Callable[[int, Callable[[], None]], None],
) -> None:
    settings = config(
        way,
        two_tower={**MINED, "mini_batch_size": 7, "loss": "sigmoid", "learn_scale": True},
        model={"input_dropout": 0.2},
        training={"epochs": 3},
    )
    dataset = two_towers.dataset(80, filtered=True)
    train_into(tmp_path / "whole", dataset, settings)
    for step in (2, 9):
        stop_at(step, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(StoppedBySignalError):
            train_into(tmp_path / "stopped", dataset, settings, resume=step > 2)
    torch.manual_seed(99)  # of no account
    train_into(tmp_path / "stopped", dataset, settings, resume=True)
    runs.assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, stop_at: Callable[[int, Callable[[], None]], None]
) -> None:
    dataset, settings = two_towers.dataset(80), two_towers.config(two_tower=MINED, training={"epochs": 3})
    train_into(tmp_path / "whole", dataset, settings)

    def die() -> None:
        raise KeyboardInterrupt

    stop_at(8, die)
    with pytest.raises(KeyboardInterrupt):
        train_into(tmp_path / "killed", dataset, settings)
    train_into(tmp_path / "killed", dataset, settings, resume=True)
    runs.assert_same_run(tmp_path / "killed", tmp_path / "whole")


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"label_documents": True}}, "label_documents must be false where model.output"),
        ({"model": {"hidden_activation": "relu"}}, "hidden_activation must be none where model.output"),
        ({"encoder": {"kind": "transformer", "path": "x"}}, "projection must be above 0 where"),
        (
            {"two_tower": {"mined_negatives": 9, "mined_from": 8}},
            "mined_negatives must be at most",
        ),
        ({"model": {"direct_fan_in": 2}}, "direct_fan_in needs output = sparse"),
        ({"two_tower": {"temperature": 0.0}}, "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    model = {"output": "two_tower"} | sections.get("model", {})
    with pytest.raises(ConfigError, match=message):
        load_config(sections | {"model": model})


def test_a_data_set_without_texts_of_labels_is_refused(tmp_path: Path) -> None:
    for kind, found in (("text", "none of the labels"), ("sparse", "sparse features")):
        with pytest.raises(DataError, match=f"needs texts of instances and labels, found {found}"):
            train_into(tmp_path / kind, problems.dataset(kind, train=30), two_towers.config())  # type: ignore[arg-type]


def test_empty_texts_of_labels_are_counted_and_all_of_them_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = two_towers.dataset(40)
    texts = two_towers.label_texts()
    none = replace(dataset, label_texts=TextColumn.from_strings([""] * dataset.label_count))
    with pytest.raises(DataError, match="labels must have texts, found 24 empty ones"):
        train_into(tmp_path / "none", none, two_towers.config())
    some = replace(dataset, label_texts=TextColumn.from_strings(["", *texts[1:]]))
    train_into(tmp_path / "some", some, two_towers.config(training={"epochs": 1}))
    assert "1 of 24 labels have an empty text" in capsys.readouterr().err
    assert evaluated(load(tmp_path / "some"), dataset)["P@1"] >= 0.0


def test_a_data_set_of_filter_pairs_only_is_refused(tmp_path: Path) -> None:
    dataset = two_towers.dataset(40)
    all_pairs = replace(dataset, train=replace(dataset.train, filter_pairs=dataset.train.labels))
    with pytest.raises(DataError, match="needs an instance with a label that is no filter pair"):
        train_into(tmp_path / "run", all_pairs, two_towers.config())


def test_a_budget_says_what_it_cannot_plan(tmp_path: Path) -> None:
    config = two_towers.config(two_tower={"mined_negatives": 1, "mining_search": "approximate"})
    with pytest.raises(ConfigError, match=r"planned with two_tower.mining_search = exact, found approximate"):
        train_into(tmp_path / "run", two_towers.dataset(40), config, budget_bytes=1 << 30)


def test_a_run_of_another_output_has_no_embeddings_of_texts(tmp_path: Path) -> None:
    train_into(tmp_path / "run", problems.dataset("text", train=40), problems.config(training={"epochs": 1}))
    with pytest.raises(ConfigError, match=r"needs a run of model.output = two_tower, found sparse"):
        load(tmp_path / "run").embed(["word1"])
    with pytest.raises(ConfigError, match=r"needs a run of model.output = two_tower, found sparse"):
        load(tmp_path / "run").with_labels(["word1"])


@pytest.mark.parametrize("way", ["words", "transformer"])
def test_a_loss_that_explodes_names_the_rate_that_trains_the_encoder(
    way: str, config: Callable[..., Config], tmp_path: Path
) -> None:
    section = {"words": "dense_optimizer", "transformer": "encoder_optimizer"}[way]
    settings = config(way, training={"explosion_factor": 1e-9})
    with pytest.raises(
        ConfigError, match=rf"a learning rate that is too high, .*; lower {section}\.learning"
    ):
        train_into(tmp_path / "run", two_towers.dataset(60), settings)
