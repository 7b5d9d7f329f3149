"""Plans of two towers: beside runs in processes of their own, budgets, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
import two_towers
from runs import xmlc

from xmlc.config import load_config
from xmlc.errors import ConfigError
from xmlc.memory.activations import EncoderMemory, Pass, TowerPasses
from xmlc.memory.budget import BudgetError, fit, needed_bytes
from xmlc.memory.exhausted import Facts, _advice, _name
from xmlc.memory.plan import plan
from xmlc.memory.pool import Occurrences, TowerTexts
from xmlc.memory.terms import Batches
from xmlc.memory.towers import HEAP
from xmlc.nn import Problem, TwoTower
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import prepare
from xmlc.training.profiling import Sizes, profile
from xmlc.training.tower_sizes import traced_batches
from xmlc.training.two_tower import pool_of, two_tower_step

LABELS = 1000
LENGTH = 20
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}


def write_texts(folder: Path, labels: int, instances: int, vocabulary: int) -> Path:
    """Write texts of as many words as an encoder reads."""
    generator = np.random.default_rng(0)
    folder.mkdir()

    def texts(rows: int, words: int) -> list[str]:
        drawn = generator.integers(0, vocabulary, (rows, words)).tolist()
        return [" ".join(f"word{word}" for word in row) for row in drawn]

    with (folder / "trn.json").open("w") as file:
        for text, label in zip(
            texts(instances, LENGTH - 2), generator.integers(0, labels, instances), strict=True
        ):
            file.write(json.dumps({"title": text, "target_ind": [int(label)]}) + "\n")
    lines = (json.dumps({"title": text}) + "\n" for text in texts(labels, 10))
    (folder / "lbl.json").write_text("".join(lines))
    return folder


def settings(*others: str, encoder: Path | None = None) -> list[str]:
    values = ["model.output=two_tower", "training.threads=1", "data.validation_fraction=0.15"]
    values += ["training.epochs=1"]
    if encoder is not None:
        values += ["encoder.kind=transformer", f"encoder.path={encoder}", f"encoder.max_length={LENGTH}"]
        values += ["encoder.frozen=false", "training.batch_size=64"]
    return [part for each in (*values, *others) for part in ("--set", each)]


def check(data: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return a profile whose plan holds, by less than what `--check` allows."""
    done = xmlc(tmp_path, "profile", str(data), *options, "--check", "--json", "--explain")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {"load", "forward", "output_step", "backward", "dense_update"} <= set(found["phases"])
    return found


@pytest.mark.parametrize(
    "others",
    [
        ("two_tower.projection=64", "two_tower.loss=sigmoid", "two_tower.random_negatives=200"),
        ("two_tower.mined_negatives=2", "two_tower.mini_batch_size=64"),
    ],
)
def test_the_plan_of_a_bag_of_words_holds(others: tuple[str, ...], tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 10_000, 1500, 8000)
    options = settings("model.hidden=128", "training.batch_size=256", *others)
    found = check(data, tmp_path, *options)
    mined = any("mined" in each for each in others)
    assert (
        ("mining" in found["phases"]) == mined == any(each["phase"] == "mining" for each in found["measured"])
    )
    held = {term["name"] for term in found["terms"]["checkpoint"]}
    assert ("mined negatives" in held) == mined
    assert {"label embeddings", "vocabulary", "adam of encoder.embedding"} <= held


@pytest.mark.parametrize(
    "others", [(), ("two_tower.mined_negatives=2", "two_tower.mini_batch_size=16", "two_tower.projection=64")]
)
def test_the_plan_of_a_transformer_holds(others: tuple[str, ...], tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "encoder", **WIDE)
    data = write_texts(tmp_path / "data", LABELS, 200, 90)
    found = check(data, tmp_path, *settings(*others, encoder=folder))
    for phase in found["measured"]:
        if phase["phase"] not in ("load", "mining", "validation"):  # there texts come by parts of one length
            tensors = sum(each["bytes"] for each in found["terms"][phase["phase"]] if each["name"] != HEAP)
            assert phase["tracked"] == pytest.approx(tensors, rel=0.05, abs=4 << 20)


def test_a_budget_shrinks_the_mini_batch_and_holds_as_a_limit(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "encoder", **WIDE)
    data = write_texts(tmp_path / "data", LABELS, 200, 90)
    wanted = settings("training.evaluation_batch=16", "training.batch_size=128", encoder=folder)
    done = xmlc(tmp_path, "profile", str(data), *wanted, "--budget", "4GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    budget = (4 << 30) - found["available_bytes"] + int(0.8 * found["needed_bytes"])
    run = str(tmp_path / "run")
    done = xmlc(tmp_path, "train", str(data), *wanted, "--out", run, "--budget", str(budget), "--enforce")
    assert done.returncode == 0, done.stderr
    assert re.search(r"to fit the budget, two_tower\.mini_batch_size = \d+ \(was 0\)", done.stderr)
    assert "epoch 1/1" in done.stderr


def test_the_planned_budget_of_a_bag_of_words_is_enough_as_a_hard_limit(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 10_000, 1000, 8000)
    wanted = settings("two_tower.mined_negatives=1", "model.hidden=128", "training.batch_size=256")
    done = xmlc(tmp_path, "profile", str(data), *wanted, "--budget", "4GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    budget = (4 << 30) - found["available_bytes"] + found["needed_bytes"] + (1 << 20)
    run = str(tmp_path / "run")
    done = xmlc(tmp_path, "train", str(data), *wanted, "--out", run, "--budget", str(budget), "--enforce")
    assert done.returncode == 0, done.stderr
    assert "to fit the budget" not in done.stderr
    assert "epoch 1/1" in done.stderr


@pytest.mark.parametrize("projection", [0, 8])
def test_weights_and_state_are_those_of_the_model(projection: int) -> None:
    config = two_towers.config(two_tower={"projection": projection})
    dataset = two_towers.dataset()
    prepared = prepare(dataset, config)
    model = TwoTower(config, prepared.problem)
    model.texts = prepared.label_texts
    optimizers = Optimizers(model)
    two_tower_step(model, next(prepared.train.epoch(0)), optimizers, 1, 0.0, Stopwatch())
    held = plan(config, prepared.problem, traced_batches(dataset, config, prepared)).held
    tensors = model.tensors()
    weights = {term.name: term.bytes for term in held if term.category == "weights"}
    assert weights == {name: tensor.nbytes for name, tensor in tensors.items()}
    state = sum(term.bytes for term in held if term.category == "optimizer")
    assert state == sum(each.nbytes for name, each in optimizers.tensors().items() if "exp_avg" in name)


def test_the_pool_is_as_large_as_those_that_are_drawn() -> None:
    config = two_towers.config(two_tower={"random_negatives": 4, "positives": 1})
    dataset = two_towers.dataset(train=600)
    prepared = prepare(dataset, config)
    towers = traced_batches(dataset, config, prepared).towers
    assert towers is not None
    model = TwoTower(config, prepared.problem)
    drawn = [
        len(pool_of(model, batch, step).own)
        for step, batch in enumerate(prepared.train.epoch(0))
        if len(batch.instances) == 16
    ]
    assert towers.pool.expected(16, 0, 4) == pytest.approx(np.mean(drawn), abs=1.0)


def test_columns_that_occur_alike_are_counted_together() -> None:
    shares = np.array([0.5] * 100 + [0.0] * 7 + [1.0])
    found = Occurrences.of(shares, np.zeros(108))
    assert len(found.columns) == 3
    assert found.expected(0, 9) == 0
    assert found.expected(1, 9) == 51
    assert found.expected(2, 0) == 76


PROBLEM = Problem(True, 64, 5000, 2000, 0.55, 1.5, np.empty(0, np.int64))
TRAINED = (
    "model.output=two_tower",
    "encoder.kind=transformer",
    "encoder.path=none",
    "encoder.frozen=false",
    "training.threads=1",
)


def batches() -> Batches:
    """Return what the plan asks of a transformer whose activations take 1 MB for each text."""
    each = Pass(np.array([2_000_000]), np.array([1e6]))
    encoder = EncoderMemory(0, 0, 1_000_000, 32, each, each, Pass(np.array([2]), np.array([1.0])))
    passes = TowerPasses(Pass(np.array([2]), np.array([1.0])), each, 1)
    pool = Occurrences.of(np.full(5000, 1e-3), np.full(5000, 1e-3), np.full(5000, 1 / 5000))
    words = Occurrences.of(np.empty(0), np.empty(0))
    return Batches(
        100, 64.0, 5.0, encoder, towers=TowerTexts(pool, 2000, 0.0, words, 0, 0, encoder, passes, passes)
    )


def test_a_budget_takes_the_mini_batch_before_the_batch() -> None:
    config = load_config(None, TRAINED)
    needed = needed_bytes(plan(config, PROBLEM, batches()))
    [change] = fit(config, PROBLEM, batches(), needed - 1).changes
    assert str(change) == f"two_tower.mini_batch_size = {config.training.batch_size} (was 0)"
    smaller = load_config(None, [*TRAINED, "two_tower.mini_batch_size=32"])
    needed = needed_bytes(plan(smaller, PROBLEM, batches()))
    [change] = fit(config, PROBLEM, batches(), needed).changes
    assert str(change) == "two_tower.mini_batch_size = 32 (was 0)"
    [change] = fit(smaller, PROBLEM, batches(), needed - 1).changes
    assert str(change) == "two_tower.mini_batch_size = 16 (was 32)"


def test_the_refusal_of_a_budget_names_what_takes_the_most() -> None:
    with pytest.raises(
        BudgetError, match=r"the most is .+ with .+; raise the budget to .+ encoder\.max_length"
    ):
        fit(load_config(None, TRAINED), PROBLEM, batches(), 1 << 20)


def test_memory_that_runs_out_names_settings_that_would_fit() -> None:
    config = load_config(None, TRAINED)
    needed = needed_bytes(plan(config, PROBLEM, batches()))
    facts = Facts(config, PROBLEM, batches(), 0)
    assert "--set two_tower.mini_batch_size=" in _advice(facts, needed - 1, limited=False)
    planned = {term.name: term.bytes for term in plan(config, PROBLEM, batches()).added["forward"]}
    assert (
        _name(facts, "forward", planned["forward passes of the encoder"])
        == " (forward passes of the encoder)"
    )
    unplanned = Facts(config, PROBLEM, Batches(100, 64.0), 0)
    assert "lower two_tower.mini_batch_size (0 keeps all activations)" in _advice(unplanned, 1, limited=False)
    assert _name(unplanned, "forward", 1 << 20) == ""


def test_scores_are_planned_by_tiles() -> None:
    config = load_config(None, [*TRAINED, "training.batch_size=2048"])
    [scores] = [
        term
        for term in plan(config, PROBLEM, batches()).added["output_step"]
        if term.name == "tiles of scores"
    ]
    assert scores.bytes == 6 * 1024 * 1024 * 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.device=cuda"], r"two towers are planned with training\.device = cpu, found cuda"),
        (
            ["two_tower.mined_negatives=1", "two_tower.mining_search=approximate"],
            r"two towers are planned with two_tower\.mining_search = exact, found approximate",
        ),
        ([], "two towers need a data set of texts, found sizes"),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(Sizes(100, 8, 0, 3, 50), overrides=["model.output=two_tower", *overrides])
