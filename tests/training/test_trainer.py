"""A run from data to checkpoints: it learns, keeps to its schedule, and repeats itself bit by bit."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import runs
import torch

from xmlc.checkpoint import CheckpointFolder
from xmlc.config import load_config
from xmlc.data import CsrRows, Dataset, open_dataset
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation import load
from xmlc.evaluation.run import evaluate_predictor
from xmlc.training import trainer
from xmlc.training.divergence import DivergedError, check_weights
from xmlc.training.phases import PHASES
from xmlc.training.run_folder import RunFolder
from xmlc.training.trainer import StoppedBySignalError

Train = Callable[..., Path]

LEARNT = 0.7
"""Precision at 1 that every model must reach; 0.9 is the most: a tenth of the instances has no label."""


def precision_on_test(run: Path, dataset: Dataset) -> float:
    return report(run, dataset)["metrics"]["P@1"]


def report(run: Path, dataset: Dataset) -> dict[str, Any]:
    return evaluate_predictor(load(run), dataset, **runs.WHOLE)


# ---- it learns -------------------------------------------------------------------------------------------


@problems.every_output
@pytest.mark.parametrize("kind", problems.KINDS)
def test_every_output_learns_from_every_kind_of_features(
    kind: problems.Kind, output: str, width: int, train: Train
) -> None:
    dataset = problems.dataset(kind)
    run = train(dataset, model={"output": output, "hidden": 64, "width": width, "bottleneck": 16})
    assert precision_on_test(run, dataset) > LEARNT


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"weight_dtype": "bfloat16"}},
        {"model": {"weight_dtype": "float8_e4m3fn"}},
        {"model": {"weight_dtype": "float8_e5m2", "group_size": 16, "weight_init": "zero"}},
        {"model": {"group_size": 16}},
        {"model": {"group_size": 64, "weight_dtype": "bfloat16"}},
        {"model": {"group_size": 16, "weight_dtype": "bfloat16", "feature_dtype": "bfloat16"}},
        {"model": {"weight_init": "zero"}},
        {"model": {"weight_init": "glorot_flat", "penultimate_init": "glorot"}},
        {"model": {"hidden_activation": "relu", "input_dropout": 0.1, "hidden_dropout": 0.1}},
        {"loss": {"kind": "bce"}},
        {"loss": {"kind": "bce", "reduction": "mean"}},
        {"loss": {"kind": "softmax"}},
        {"loss": {"kind": "decoupled_softmax", "reduction": "mean", "gradient_cutoff": 1e-3}},
        {"loss": {"positive_weight": 2.0, "positive_weight_propensity": True}},
        {"output_optimizer": {"kind": "sgd", "learning_rate": 0.05}},
        {"output_optimizer": {"kind": "momentum", "learning_rate": 0.01}},
        {"output_optimizer": {"kind": "label_adam", "learning_rate": 0.01}},
        {"output_optimizer": {"kind": "momentum", "learning_rate": 0.01, "state_dtype": "float8_e4m3fn"}},
        {"dense_optimizer": {"kind": "sgd", "learning_rate": 0.5}, "training": {"epochs": 25}},
        {"redistribution": {"mode": "threshold", "threshold": 0.05, "scope": "group", "new_value": "random"}},
        {"schedule": {"kind": "linear", "warmup_steps": 10}},
        {"schedule": {"kind": "cosine"}},
        {"schedule": {"kind": "plateau"}},
        {"training": {"clip_norm": 0.5}},
        {"data": {"unit_length": False}},
    ],
    ids=lambda sections: "-".join(
        f"{key}={value}" for settings in sections.values() for key, value in settings.items()
    ),
)
def test_every_choice_learns(sections: dict[str, dict[str, Any]], train: Train) -> None:
    sections = {**sections, "training": {"epochs": 12} | sections.get("training", {})}
    dataset = problems.dataset("sparse")
    assert precision_on_test(train(dataset, **sections), dataset) > LEARNT


def test_float8_weights_reach_about_float32_s_precision(train: Train) -> None:
    # Seeds fix all draws. Of 300 instances 0.05 are 15, of which some change sides by chance.
    dataset = problems.dataset("sparse", train=400, test=300)
    found = {
        dtype: precision_on_test(train(dataset, dtype, model={"weight_dtype": dtype}), dataset)
        for dtype in ("float32", "float8_e4m3fn", "float8_e5m2")
    }
    assert min(found.values()) > found["float32"] - 0.05, found


def test_narrow_states_reach_about_float32_s_precision(train: Train) -> None:
    dataset = problems.dataset("sparse", train=400, test=300)
    found = {
        dtype: precision_on_test(train(dataset, dtype, output_optimizer={"state_dtype": dtype}), dataset)
        for dtype in ("float32", "bfloat16", "float8_e4m3fn")
    }
    assert min(found.values()) > found["float32"] - 0.05, found


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_float8_weights_that_are_not_finite_are_not_saved(value: float) -> None:
    weight = torch.zeros(70, 3).to(torch.float8_e5m2)
    check_weights({"output.weight": weight})
    weight[69, 2] = value
    with pytest.raises(DivergedError, match=r"the weights must stay finite, found output\.weight from"):
        check_weights({"output.weight": weight})


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_every_optimizer_of_the_dense_part_learns(kind: str, train: Train) -> None:
    dataset = problems.dataset("dense")
    rate = {"sgd": 0.02, "momentum": 0.01, "adam": 0.01}[kind]
    run = train(
        dataset,
        dense_optimizer={"kind": kind, "learning_rate": rate, "weight_decay": 1e-3},
        training={"epochs": 12},
    )
    assert precision_on_test(run, dataset) > LEARNT


def test_character_ngrams_learn(train: Train) -> None:
    dataset = problems.dataset("text")
    run = train(dataset, text={"character_ngrams": [2, 3]})
    assert precision_on_test(run, dataset) > LEARNT


# ---- odd shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", problems.KINDS)
@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        ({"labels": 1, "train": 20}, {}),
        ({"train": 1, "test": 1}, {}),
        ({"train": 30}, {"training": {"batch_size": 1000}}),
        ({"train": 30}, {"data": {"validation_fraction": 0.99}}),
        ({"train": 30}, {"data": {"validation_fraction": 0.0}}),
        ({"train": 30}, {"model": {"width": 16, "fan_in": 16}}),
        ({"train": 30}, {"model": {"width": 1, "fan_in": 1, "hidden": 1}}),
        ({"train": 33}, {"training": {"batch_size": 1}}),
    ],
    ids=[
        "one-label",
        "one-instance",
        "batch-above-data",
        "one-trained-on",
        "no-validation",
        "fan_in-is-width",
        "one-unit",
        "batch-of-one",
    ],
)
def test_odd_shapes_train_and_evaluate(
    kind: problems.Kind, sizes: dict[str, int], sections: dict[str, dict[str, Any]], train: Train
) -> None:
    dataset = problems.dataset(kind, **sizes)
    run = train(dataset, **{**sections, "training": {"epochs": 2} | sections.get("training", {})})
    assert 0.0 <= precision_on_test(run, dataset) <= 1.0


# ---- the test set chooses nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", problems.KINDS)
def test_another_test_set_changes_nothing_of_a_run(kind: problems.Kind, train: Train) -> None:
    first, second = problems.split(kind, 100, 1), problems.split(kind, 50, 2)
    spoilt = problems.split(kind, 70, 99)
    one = Dataset.from_arrays(
        first.features, first.labels, test_features=second.features, test_labels=second.labels
    )
    other = Dataset.from_arrays(
        first.features, first.labels, test_features=spoilt.features, test_labels=spoilt.labels[::-1]
    )
    without = Dataset.from_arrays(first.features, first.labels)
    folders = [
        train(dataset, name) for name, dataset in (("one", one), ("other", other), ("without", without))
    ]
    for which in ("latest", "best"):
        bits = [runs.checkpoint(folder, which)[0] for folder in folders]
        assert bits[0] == bits[1] == bits[2]
    assert runs.metrics(folders[0]) == runs.metrics(folders[1]) == runs.metrics(folders[2])


class Untouchable:
    """Stands for a test split that nobody may look at."""

    features = None
    texts = None
    instances = 50

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"training must not read the test set's {name}")


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_training_does_not_look_at_the_test_set(kind: problems.Kind, train: Train) -> None:
    dataset: Any = replace(problems.dataset(kind), test=Untouchable())  # type: ignore[arg-type]
    train(dataset, training={"epochs": 1})


def test_the_paper_protocol_reports_the_test_set_as_validation(train: Train) -> None:
    dataset = problems.dataset()
    run = train(dataset, training={"paper_protocol": True})
    best = max(runs.metrics(run), key=lambda entry: entry["validation"]["P@1"])
    found = report(run, dataset)["metrics"]
    assert best["validation"] == {name: found[name] for name in best["validation"]}


# ---- repeatable ------------------------------------------------------------------------------------------

EVERYTHING: dict[str, dict[str, Any]] = {
    "model": {"input_dropout": 0.2, "hidden_dropout": 0.2, "weight_dtype": "bfloat16"},
    "redistribution": {"new_value": "random", "interval_steps": 3},
    "training": {"epochs": 3, "clip_norm": 1.0},
}


@pytest.mark.parametrize("kind", problems.KINDS)
def test_the_same_seed_gives_the_same_bits(kind: problems.Kind, train: Train) -> None:
    one, other = (train(problems.dataset(kind), name, **EVERYTHING) for name in ("one", "other"))
    runs.assert_same_run(one, other)


def test_another_seed_gives_another_run(train: Train) -> None:
    one = train(problems.dataset(), "one", **EVERYTHING)
    other = train(
        problems.dataset(), "other", **EVERYTHING | {"training": {**EVERYTHING["training"], "seed": 4}}
    )
    assert runs.checkpoint(one)[0]["model.output.weight"] != runs.checkpoint(other)[0]["model.output.weight"]


def test_no_global_generator_has_a_say(train: Train) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    one = train(problems.dataset(), "one", **EVERYTHING)
    torch.manual_seed(2)
    np.random.seed(2)
    runs.assert_same_run(one, train(problems.dataset(), "other", **EVERYTHING))


# ---- schedule and stopping -------------------------------------------------------------------------------

FROZEN: dict[str, dict[str, Any]] = {
    "output_optimizer": {"kind": "sgd", "learning_rate": 0.0},
    "dense_optimizer": {"kind": "sgd", "learning_rate": 0.0},
    "redistribution": {"interval_steps": 0},
}
"""Nothing moves, so that no evaluation gains on the first."""


def test_training_stops_when_the_metric_stalls_and_keeps_the_best_epoch(train: Train) -> None:
    run = train(problems.dataset(), **FROZEN, training={"patience": 2, "epochs": 9})
    assert [entry["best"] for entry in runs.metrics(run)] == [True, False, False]
    folder = CheckpointFolder(run / "checkpoints")
    assert folder.names() == ["step-0000000012", "step-0000000036"]
    best, latest = folder.best(), folder.latest()
    assert best is not None
    assert latest is not None
    assert (best.name, latest.name) == ("step-0000000012", "step-0000000036")
    assert load(run).metadata["position"]["epoch"] == 1
    assert load(run, "latest").metadata["position"]["epoch"] == 3


def test_a_patience_of_zero_trains_to_the_end(train: Train) -> None:
    run = train(problems.dataset(), **FROZEN, training={"patience": 0, "epochs": 5})
    assert len(runs.metrics(run)) == 5


def test_without_validation_the_last_epoch_is_the_best(train: Train) -> None:
    run = train(problems.dataset(), data={"validation_fraction": 0.0}, training={"epochs": 3, "patience": 1})
    assert [entry["best"] for entry in runs.metrics(run)] == [True, True, True]
    assert all("validation" not in entry for entry in runs.metrics(run))
    assert load(run).metadata["position"]["epoch"] == 3


def test_the_rate_halves_on_a_plateau(train: Train) -> None:
    run = train(
        problems.dataset(),
        **FROZEN,
        schedule={"kind": "plateau", "patience": 1, "factor": 0.5, "min_fraction": 0.2},
        training={"epochs": 5},
    )
    factors = [entry["learning_rate_factor"] for entry in runs.metrics(run)]
    assert factors == [1.0, 1.0, 0.5, 0.25, 0.2]


def test_the_metric_that_chooses_is_the_asked_one(train: Train) -> None:
    run = train(problems.dataset(), training={"metric": "PSnDCG@7", "epochs": 6, "min_delta": 0.0})
    entries = runs.metrics(run)
    values = [entry["validation"]["PSnDCG@7"] for entry in entries]
    rising = [value > max(values[:place], default=-1) for place, value in enumerate(values)]
    assert [entry["best"] for entry in entries] == rising


def test_connections_move_at_the_steps_of_the_policy_and_no_others(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 steps an epoch, 3 epochs, moving from step 5 to step 18."""
    seen: dict[int, bytes] = {}
    step_of = trainer.training_step

    def watching(model: Any, batch: Any, optimizers: Any, rate: float, step: int, *others: Any) -> Any:
        seen[step - 1] = model.output.indices.numpy().tobytes()
        return step_of(model, batch, optimizers, rate, step, *others)

    monkeypatch.setattr(trainer, "training_step", watching)
    run = train(
        problems.dataset(),
        redistribution={"interval_steps": 6, "first_step": 5, "end": 0.5, "decay": "constant"},
        training={"epochs": 3},
    )
    moved = [step for step in range(1, 36) if seen[step] != seen[step - 1]]
    assert moved == [5, 11, 17]
    recorded = [entry for line in runs.metrics(run) for entry in line["redistributions"]]
    assert [entry["step"] for entry in recorded] == moved
    assert all(entry["moved"] > 0 for entry in recorded)
    log = (run / "train.log").read_text()
    assert [
        int(line.split("step ")[1].split(":")[0]) for line in log.splitlines() if "redist" in line
    ] == moved


# ---- a loss that is no number ----------------------------------------------------------------------------


def test_a_loss_that_explodes_is_an_error_that_names_step_and_rates(train: Train) -> None:
    with pytest.raises(ConfigError) as caught:
        train(problems.dataset(), output_optimizer={"kind": "sgd", "learning_rate": 1e30})
    message = str(caught.value)
    assert "the loss must stay finite, found inf at step 2" in message
    assert "output_optimizer.learning_rate (1e+30)" in message
    assert "dense_optimizer.learning_rate (0.01)" in message


def test_a_loss_that_explodes_leaves_the_last_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = problems.dataset()
    still = {"interval_steps": 0}
    whole = train(dataset, "whole", training={"epochs": 2}, redistribution=still)
    step_of = trainer.training_step

    def exploding(model: Any, batch: Any, optimizers: Any, rate: float, step: int, *others: Any) -> Any:
        loss = step_of(model, batch, optimizers, rate, step, *others)
        if step == 30:  # in the third epoch
            model.output.weight.fill_(math.nan)
            return torch.tensor(math.nan)
        return loss

    monkeypatch.setattr(trainer, "training_step", exploding)
    with pytest.raises(DivergedError, match=r"found nan at step 30; .*step-0000000024 was written before"):
        train(dataset, "exploded", training={"epochs": 4}, redistribution=still)
    exploded = tmp_path / "exploded"
    assert runs.metrics(exploded) == runs.metrics(whole)
    assert runs.checkpoint(exploded)[0] == runs.checkpoint(whole)[0]
    assert precision_on_test(exploded, dataset) == precision_on_test(whole, dataset)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the steps after some step, where the output layer's rate is above ``rate``, have this loss."""

    def arrange(step: int, loss: float, weight: float = 0.0, rate: float = 0.0) -> None:
        step_of = trainer.training_step

        def spoiling(model: Any, batch: Any, optimizers: Any, found: float, number: int, *others: Any) -> Any:
            usual = step_of(model, batch, optimizers, found, number, *others)
            if number < step or found <= rate:
                return usual
            model.output.weight[0, 0] += weight
            return usual if loss == 0.0 else torch.tensor(loss)

        monkeypatch.setattr(trainer, "training_step", spoiling)

    return arrange


def test_a_finite_loss_far_above_the_first_has_exploded(train: Train, tmp_path: Path, spoil: Any) -> None:
    spoil(15, 1e9)
    with pytest.raises(DivergedError) as caught:
        train(problems.dataset())
    message = str(caught.value)
    for words in (
        "the loss must stay below training.explosion_factor = 1e+06 times the first one (",
        "), found 1e+09 at step 15; the likely cause: learning rates that are too high, 0.01 and 0.01 in",
        f"; {tmp_path / 'run' / 'checkpoints' / 'step-0000000012'} was written before",
    ):
        assert words in message
    assert load(tmp_path / "run").metadata["position"]["step"] == 12


def test_what_has_exploded_is_a_setting(train: Train, spoil: Any) -> None:
    spoil(15, 1e9)
    train(problems.dataset(), "never", training={"explosion_factor": 0.0, "epochs": 2})
    spoil(15, 1e3)
    with pytest.raises(DivergedError, match=r"training\.explosion_factor = 5 times the first .* at step 15"):
        train(problems.dataset(), training={"explosion_factor": 5.0})


@pytest.mark.parametrize("step", [12, 15])
def test_weights_that_are_no_numbers_are_found_before_a_checkpoint_holds_them(
    step: int, train: Train, tmp_path: Path, spoil: Any
) -> None:
    """The loss of a step is that of the weights before its update, so the next one would tell."""
    spoil(step, 0.0, weight=math.nan)
    with pytest.raises(DivergedError, match=rf"found output\.weight from nan to nan at step {step};"):
        train(problems.dataset(), training={"checkpoint_seconds": 0.0 if step == 15 else 600.0})
    run = tmp_path / "run"
    if step == 12:
        assert not (run / "metrics.jsonl").exists()
        assert CheckpointFolder(run / "checkpoints").names() == []
    else:
        assert CheckpointFolder(run / "checkpoints").latest() == run / "checkpoints" / "step-0000000014"


def test_features_that_are_too_large_are_named_as_the_cause(train: Train) -> None:
    data = problems.split("dense", 100)
    large = Dataset.from_arrays(data.features * np.float32(1e25), data.labels)
    message = r"at step 1; the likely cause: features as large as \S+e\+25 in this batch; scale them down; no"
    with pytest.raises(DivergedError, match=message):
        train(large)


def test_a_run_that_diverges_goes_back_with_lower_rates_where_asked_to(
    train: Train, tmp_path: Path, spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = problems.dataset()
    spoil(15, math.nan, weight=math.nan, rate=0.003)
    run = train(dataset, training={"epochs": 3, "on_divergence": "lower_rate"})
    lines = [line for line in capsys.readouterr().err.splitlines() if "going back" in line]
    assert [line.partition("; going back ")[2] for line in lines] == [
        "to step 12 with 0.5 of the learning rates",
        "to step 12 with 0.25 of the learning rates",
    ]
    assert [entry["learning_rate_factor"] for entry in runs.metrics(run)] == [1.0, 0.25, 0.25]
    assert all(line in (run / "train.log").read_text() for line in lines)
    assert math.isfinite(runs.metrics(run)[-1]["loss"])


def test_a_lowered_run_goes_on_to_the_same_bits(
    train: Train, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, settings = problems.dataset(), {"epochs": 3, "on_divergence": "lower_rate"}
    spoil(15, math.nan, weight=math.nan, rate=0.003)
    whole = train(dataset, "whole", training=settings)
    spoiling = trainer.training_step
    for stop in (1, 12, 20, 30):  # not 13 or 14: it would go back to the checkpoint of that stop

        def stopping(*arguments: Any, stop: int = stop) -> Any:
            if arguments[4] == stop:
                monkeypatch.setattr(trainer, "training_step", spoiling)
                signal.raise_signal(signal.SIGTERM)
            return spoiling(*arguments)

        monkeypatch.setattr(trainer, "training_step", stopping)
        with pytest.raises(StoppedBySignalError):
            train(dataset, f"stopped-{stop}", training=settings)
        resumed = train(dataset, f"stopped-{stop}", resume=True, training=settings)
        runs.assert_same_run(resumed, whole)


def test_rates_are_lowered_ten_times_at_most(train: Train, tmp_path: Path) -> None:
    output = {"kind": "sgd", "learning_rate": 1e30}
    with pytest.raises(DivergedError, match=r"the rates had been lowered to 0\.000977 of the settings'"):
        train(problems.dataset(), output_optimizer=output, training={"on_divergence": "lower_rate"})
    assert load(tmp_path / "run").metadata["position"]["step"] == 0


# ---- the run folder --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on files."""
    folder = tmp_path_factory.mktemp("files")
    dataset = open_dataset(problems.write_folder(folder / "toy", "text"))
    trainer.train_into(folder / "run", dataset, problems.config(training={"epochs": 3}))
    return folder / "run"


def test_a_run_folder_holds_what_it_says(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        ".lock",
        "config.toml",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "train.log",
        "checkpoints",
    }


def test_its_config_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    config = load_config(finished / "config.toml")
    assert config == problems.config(training={"epochs": 3})
    trainer.train_into(tmp_path / "again", open_dataset(finished.parent / "toy"), config)
    runs.assert_same_run(tmp_path / "again", finished)


def test_its_environment_names_versions_machine_and_commit(finished: Path) -> None:
    facts = json.loads((finished / "environment.json").read_text())
    assert facts["packages"]["torch"] == torch.__version__
    assert set(facts["packages"]) == {"xmlc", "torch", "numpy", "scipy", "scikit-learn", "safetensors"}
    assert facts["native"]["cpu_kernels_in_use"] in facts["native"]["cpu_kernels"]
    assert facts["command"]
    assert facts["started"].endswith("+00:00")
    assert facts["git_commit"] is None or len(facts["git_commit"]) == 40


def test_it_identifies_its_data(finished: Path) -> None:
    dataset = open_dataset(finished.parent / "toy")
    assert json.loads((finished / "data.json").read_text()) == {
        "name": "toy",
        "source": str(finished.parent / "toy"),
        "fingerprint": dataset.fingerprint,
        "kind": "text",
        "instances": 200,
        "labels": 24,
    }


def test_its_metrics_have_a_line_for_each_epoch(finished: Path) -> None:
    entries = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["epoch"], entry["step"]) for entry in entries] == [(1, 12), (2, 24), (3, 36)]
    losses = [entry["loss"] for entry in entries]
    assert losses == sorted(losses, reverse=True)
    seconds = [entry["train_seconds"] for entry in entries]
    assert seconds == sorted(seconds)
    for entry in entries:
        assert set(entry) == {
            "epoch",
            "step",
            "loss",
            "learning_rate_factor",
            "validation",
            "validation_deciles",
            "best",
            "redistributions",
            "active_share",
            "train_seconds",
            "phase_seconds",
            "peak_memory_bytes",
        }
        assert set(entry["validation"]) == {
            f"{name}@{rank}" for name in ("P", "nDCG", "R", "PSP", "PSnDCG") for rank in range(1, 6)
        }
        assert entry["peak_memory_bytes"] > 2**20
        assert 0.0 < entry["active_share"] < 1.0
        assert len(entry["validation_deciles"]) == 10
        assert sum(decile["labels"] for decile in entry["validation_deciles"]) == 24
        for name in ("P@1", "P@5"):  # every hit is in one decile
            parts = sum(decile[name] for decile in entry["validation_deciles"])
            assert parts == pytest.approx(entry["validation"][name])
        assert set(entry["phase_seconds"]) == set(PHASES)
        for name in ("data", "forward", "output_step", "dense_update", "validation"):
            assert entry["phase_seconds"][name] > 0.0


def test_the_phases_take_no_longer_than_the_run(train: Train) -> None:
    started = time.perf_counter()
    run = train(problems.dataset(), training={"epochs": 3, "checkpoint_seconds": 0.0})
    passed = time.perf_counter() - started
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = {name: sum(entry["phase_seconds"][name] for entry in entries) for name in PHASES}
    assert 0.0 < sum(spent.values()) <= passed
    steps = sum(spent[name] for name in ("data", "forward", "output_step", "dense_update", "redistribution"))
    assert steps <= entries[-1]["train_seconds"] + 1e-3
    assert all(seconds > 0.0 for seconds in spent.values())


def test_a_dense_output_has_no_redistributions_to_record(train: Train) -> None:
    run = train(problems.dataset(), model={"output": "dense"}, training={"epochs": 1})
    assert not {"redistributions", "active_share"} & set(runs.metrics(run)[0])


@pytest.mark.parametrize(("loss", "share"), [("bce", 1.0), ("softmax", None), ("decoupled_softmax", None)])
def test_the_active_share_is_recorded_for_losses_of_single_logits(
    train: Train, loss: str, share: float | None
) -> None:
    run = train(problems.dataset(), loss={"kind": loss}, training={"epochs": 1})
    assert runs.metrics(run)[0].get("active_share") == share


def test_its_log_tells_the_course(finished: Path) -> None:
    log = (finished / "train.log").read_text()
    for words in ("threads with", "kernels", "step 5: redistributed", "epoch 3/3  loss", "finished after 36"):
        assert words in log


def test_only_the_latest_and_the_best_checkpoint_stay(finished: Path) -> None:
    folder = CheckpointFolder(finished / "checkpoints")
    assert set(folder.names()) == {path.name for path in (folder.latest(), folder.best()) if path is not None}


def test_checkpoints_within_an_epoch_do_not_pile_up(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every ten minutes of a long epoch would fill the disk."""
    most = 0
    save = CheckpointFolder.save

    def counting(self: CheckpointFolder, *args: Any) -> Path:
        nonlocal most
        path = save(self, *args)
        most = max(most, len(self.names()))
        return path

    monkeypatch.setattr(CheckpointFolder, "save", counting)
    train(problems.dataset(), training={"checkpoint_seconds": 0.0, "epochs": 2})
    assert most <= 3  # the best, the one before, and the new one


def test_a_checkpoint_names_config_problem_and_data(finished: Path) -> None:
    _, facts = runs.checkpoint(finished)
    assert facts["config"]["training"]["epochs"] == 3
    assert facts["problem"]["label_count"] == 24
    assert facts["data"]["name"] == "toy"
    assert facts["position"].pop("first_loss") > 0.0
    assert facts["position"] == {
        "epoch": 3,
        "batch": 0,
        "step": 36,
        "loss_sum": 0.0,
        "finished": False,
        "redistributions": [],
    }


# ---- refusals --------------------------------------------------------------------------------------------


def test_a_folder_with_files_is_refused_and_left_alone(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="a new run needs a new or empty folder, found files in it"):
        train(problems.dataset())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"mine.txt", ".lock"}


def test_an_empty_folder_is_taken(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    train(problems.dataset(), training={"epochs": 1})


def test_settings_that_do_not_fit_the_data_leave_the_folder_empty(train: Train, tmp_path: Path) -> None:
    """So that the corrected command can name it again."""
    with pytest.raises(ConfigError, match=r"dense_optimizer\.kind must be adam or sgd"):
        train(problems.dataset(), dense_optimizer={"kind": "momentum"})
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
    train(problems.dataset(), training={"epochs": 1})


def test_a_second_process_is_refused(train: Train, tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path / "run").locked(),
        pytest.raises(CheckpointError, match="one process may train into a run folder, found another"),
    ):
        train(problems.dataset())


@pytest.mark.parametrize("place", ["file", "file/below", "dangling"])
def test_a_place_that_cannot_be_a_folder_is_refused(place: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(CheckpointError, match="the run folder must be"):
        train(problems.dataset(), place)


def test_a_linked_folder_and_a_name_with_blanks_are_taken(train: Train, tmp_path: Path) -> None:
    (tmp_path / "ein Lauf für 日本").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ein Lauf für 日本")
    run = train(problems.dataset(), "link", training={"epochs": 1})
    assert (tmp_path / "ein Lauf für 日本" / "config.toml").is_file()
    assert load(run).takes == "sparse"


def test_a_thread_other_than_the_main_one_trains(train: Train) -> None:
    """Only the main thread may ask for signals."""
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(train(problems.dataset(), training={"epochs": 1})))
    thread.start()
    thread.join()
    assert len(done) == 1


def test_label_names_of_any_script_come_back(train: Train) -> None:
    part = problems.split("sparse", 60, labels=4)
    names = ["Ä ö", "日本", "a\u2028b", "😀 "]
    dataset = Dataset.from_arrays(part.features, part.labels, label_names=names)
    predictor = load(train(dataset, training={"epochs": 1}))
    assert [predictor.label_name(label) for label in range(4)] == names


def test_the_empty_class_of_rows_is_no_problem(train: Train) -> None:
    """One labelled instance among many without, in batches of one."""
    part = problems.split("sparse", 30)
    labels = CsrRows(np.array([0, 1] + [1] * 29), np.array([5], np.int32), None, 24)
    dataset = Dataset.from_arrays(part.features, labels)
    train(dataset, training={"epochs": 1, "batch_size": 1}, data={"validation_fraction": 0.0})
