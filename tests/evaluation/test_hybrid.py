"""A sparse output layer and two towers, ranked by the sum of their scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import torch
import two_towers
from click.testing import CliRunner
from runs import WHOLE

from xmlc.cli import main
from xmlc.data import open_dataset
from xmlc.errors import ConfigError
from xmlc.evaluation import Predictor, hybrid, load
from xmlc.evaluation.run import evaluate_predictor, evaluate_run
from xmlc.nn import Model, TwoTower, two_tower
from xmlc.training.trainer import train_into

HELD_OUT = {"data": {"validation_fraction": 0.2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of texts, a run of each kind, and one that has held out other instances."""
    folder = tmp_path_factory.mktemp("hybrid")
    dataset = two_towers.dataset(filtered=True)
    train_into(folder / "head", dataset, problems.config(**HELD_OUT))
    train_into(folder / "tower", dataset, two_towers.config(**HELD_OUT))
    other = HELD_OUT | {"training": {"seed": 5, "batch_size": 16}}
    train_into(folder / "other", dataset, two_towers.config(**other))
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Predictor, Predictor]:
    return load(folder / "head"), load(folder / "tower")


def test_the_scores_are_logits_plus_cosines_above_the_floor(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[Predictor, Predictor]
) -> None:
    head, tower = runs
    monkeypatch.setattr(hybrid, "NEAREST", 7)
    dataset = two_towers.dataset(filtered=True)
    assert dataset.test is not None and dataset.test.texts is not None
    labels = dataset.label_count
    joined = hybrid.join(head, tower, tower.of_texts(dataset.test.texts), 1.5)
    texts = [dataset.test.texts[number] for number in range(dataset.test.instances)]
    logits, order = (torch.from_numpy(each) for each in head.top_labels(texts, labels))
    dense = torch.empty(len(texts), labels).scatter(1, order, logits)
    assert isinstance(tower.model, TwoTower)
    cosines = torch.from_numpy(tower.embed(texts)) @ tower.model.embed_labels().T
    floor = cosines.topk(7, dim=1).values[:, -1:]
    expected = dense + 1.5 * (cosines - floor).clamp_min(0.0)
    found = replace(head, model=joined).top_labels(texts, labels)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.from_numpy(found[0]), expected.sort(1, descending=True).values)
    torch.testing.assert_close(torch.from_numpy(found[0]), expected.gather(1, torch.from_numpy(found[1])))


def test_a_weight_of_zero_ranks_as_the_head_alone(runs: tuple[Predictor, Predictor]) -> None:
    head, tower = runs
    dataset = two_towers.dataset(filtered=True)
    alone = evaluate_predictor(head, dataset, **WHOLE)
    joined = evaluate_predictor(head, dataset, **WHOLE, tower=tower, tower_weight=0.0)
    assert joined["metrics"] == alone["metrics"]
    assert (joined["tower_weight"], alone["tower_weight"]) == (0.0, None)


def test_the_weight_is_the_best_on_what_both_held_out(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[Predictor, Predictor]
) -> None:
    head, tower = runs
    dataset = two_towers.dataset(filtered=True)
    seen: dict[float, float] = {}
    measured = hybrid.evaluate_model

    def recorded(ranker: hybrid.Hybrid, stream: Any, *args: Any) -> Any:
        report = measured(ranker, stream, *args)
        seen[ranker.weight] = report.values["P@1"]
        assert np.array_equal(stream.rows, hybrid.held_out(head, tower, dataset))
        return report

    monkeypatch.setattr(hybrid, "evaluate_model", recorded)
    report = evaluate_predictor(head, dataset, **WHOLE, tower=tower)
    assert tuple(seen) == hybrid.WEIGHTS
    assert report["tower_weight"] == max(seen, key=lambda weight: seen[weight])
    assert len(hybrid.held_out(head, tower, dataset)) == 24


def test_the_nearest_labels_are_searched_once_for_all_weights(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[Predictor, Predictor]
) -> None:
    head, tower = runs
    dataset = two_towers.dataset(filtered=True)
    searched = []
    nearest = two_tower.nearest

    def counted(queries: torch.Tensor, *args: Any) -> Any:
        searched.append(len(queries))
        return nearest(queries, *args)

    monkeypatch.setattr(two_tower, "nearest", counted)
    evaluate_predictor(head, dataset, **WHOLE, tower=tower)
    assert searched == [24, 40]  # held out, test


def test_runs_that_do_not_go_together_are_refused(folder: Path, runs: tuple[Predictor, Predictor]) -> None:
    head, tower = runs
    dataset = two_towers.dataset(filtered=True)
    with pytest.raises(ConfigError, match=r"the run must be of model.output = sparse, found two_tower"):
        evaluate_predictor(tower, dataset, **WHOLE, tower=tower)
    with pytest.raises(ConfigError, match=r"must be a run of model.output = two_tower, found sparse"):
        evaluate_predictor(head, dataset, **WHOLE, tower=head)
    other = load(folder / "other")
    with pytest.raises(ConfigError, match=r"held out the same instances of toy-texts, found .*seed \[3, 5\]"):
        evaluate_predictor(head, dataset, **WHOLE, tower=other)
    assert evaluate_predictor(head, dataset, **WHOLE, tower=other, tower_weight=1.0)["tower_weight"] == 1.0
    longer = tower.with_labels(["a new one"])
    with pytest.raises(ConfigError, match=r"must know the same labels, found 24 and 25"):
        evaluate_predictor(head, dataset, **WHOLE, tower=longer, tower_weight=1.0)
    sparse = replace(tower, vectorizer=None)
    with pytest.raises(ConfigError, match=r"must take the text instances of toy-texts, found sparse"):
        evaluate_predictor(head, dataset, **WHOLE, tower=sparse, tower_weight=1.0)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_out_of_range_is_refused(folder: Path, weight: float) -> None:
    with pytest.raises(ConfigError, match=r"tower_weight must be a number from 0 on, of a tower, found"):
        evaluate_run(folder / "head", tower=folder / "tower", tower_weight=weight)


def test_a_weight_without_a_tower_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"of a tower, found 1.0 and tower None; name the run"):
        evaluate_run(folder / "head", tower_weight=1.0)


def test_the_command_line_adds_a_tower(tmp_path: Path) -> None:
    for name, settings in (("head", []), ("tower", ["--set", "model.output=two_tower"])):
        shared = ["--set", "training.epochs=1", "--set", "model.hidden=16", "--set", "model.width=64"]
        result = CliRunner().invoke(
            main, ["train", "wordnet-mini", "--out", str(tmp_path / name), *shared, *settings]
        )
        assert result.exit_code == 0, result.output
    call = ["eval", str(tmp_path / "head"), "--tower", str(tmp_path / "tower")]
    report = json.loads(CliRunner().invoke(main, [*call, "--json"]).stdout)
    assert report["tower"] == str(tmp_path / "tower")
    assert report["tower_weight"] in hybrid.WEIGHTS
    alone = json.loads(CliRunner().invoke(main, [*call[:2], "--json"]).stdout)
    heavy = json.loads(CliRunner().invoke(main, [*call, "--json", "--tower-weight", "8"]).stdout)
    assert heavy["metrics"] != alone["metrics"]
    shown = CliRunner().invoke(main, [*call, "--tower-weight", "2"]).stdout
    assert f"two towers added: {tmp_path / 'tower'}, weight 2" in shown
    dataset = open_dataset("wordnet-mini")
    head, tower = load(tmp_path / "head"), load(tmp_path / "tower")
    assert isinstance(head.model, Model) and len(hybrid.held_out(head, tower, dataset)) > 0
