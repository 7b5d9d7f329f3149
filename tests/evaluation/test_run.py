"""`evaluate_run`: what a run is measured on, what the report says, and what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import scipy.sparse

from xmlc.data import Dataset, open_dataset
from xmlc.errors import CheckpointError, ConfigError, DataError
from xmlc.evaluation.run import evaluate_run, report_table
from xmlc.metrics import inverse_propensity
from xmlc.training.trainer import train_into


@pytest.fixture
def run(runs_by_kind: dict[str, Path]) -> Path:
    return runs_by_kind["text"]


@pytest.mark.parametrize("kind", problems.KINDS)
def test_a_report_is_json_that_says_what_was_measured(kind: str, runs_by_kind: dict[str, Path]) -> None:
    report = evaluate_run(runs_by_kind[kind])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    metrics, fingerprint = report.pop("metrics"), report.pop("fingerprint")
    assert report == {
        "data": "toy",
        "split": "test",
        "instances": 50,
        "unlabelled_instances": 5,
        "labels": 24,
        "masked_pairs": 3,
        "propensity_a": 0.55,
        "propensity_b": 1.5,
        "trained_on_this_data": True,
        "epoch": report["epoch"],
        "deciles": [],
        "run": str(runs_by_kind[kind]),
        "checkpoint": "best",
        "tower": None,
        "tower_weight": None,
    }
    assert len(fingerprint) == 32
    names = ("P", "nDCG", "R", "PSP", "PSnDCG", "PSR", "coverage", "macroP")
    assert set(metrics) == {f"{name}@{rank}" for name in names for rank in range(1, 6)}
    assert all(0.0 <= value <= 1.0 for value in metrics.values())
    assert metrics["P@1"] > 0.6


def test_k_is_the_largest_rank(run: Path) -> None:
    metrics = evaluate_run(run, k=2)["metrics"]
    assert {name.partition("@")[2] for name in metrics} == {"1", "2"}


def test_more_ranks_than_labels_are_no_error(run: Path) -> None:
    metrics = evaluate_run(run, k=100)["metrics"]
    assert metrics["R@100"] == pytest.approx(evaluate_run(run, k=24)["metrics"]["R@24"])


def test_without_masking_no_pair_is_masked(run: Path) -> None:
    assert evaluate_run(run, mask_filter_pairs=False)["masked_pairs"] == 0


def test_the_training_split_can_be_measured(run: Path) -> None:
    report = evaluate_run(run, split="train")
    assert (report["split"], report["instances"]) == ("train", 200)


def test_propensity_constants_can_be_given(run: Path) -> None:
    """They weigh hits by the training frequencies of the run, whatever the data evaluated on."""
    own, other = evaluate_run(run), evaluate_run(run, propensity_a=0.0, propensity_b=2.0)
    assert (other["propensity_a"], other["propensity_b"]) == (0.0, 2.0)
    assert other["metrics"]["P@1"] == own["metrics"]["P@1"]
    assert other["metrics"]["PSP@1"] == pytest.approx(own["metrics"]["P@1"] / 0.9)  # a = 0: all alike
    dataset = open_dataset(run.parent / "toy")
    counts = np.bincount(dataset.train.labels.indices, minlength=24)
    assert inverse_propensity(counts, 200, 0.0, 2.0).std() == 0.0


@pytest.mark.parametrize(
    "constants", [{"propensity_a": -1.0}, {"propensity_b": 0.0}, {"propensity_a": np.nan}]
)
def test_impossible_propensity_constants_are_refused(constants: dict[str, Any], run: Path) -> None:
    with pytest.raises(ConfigError, match="propensity: a must be at least 0 and b above 0"):
        evaluate_run(run, **constants)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"split": "validation"}, "evaluate: split must be test or train, found 'validation'; choose one"),
        ({"which": "last"}, "load: which must be best or latest, found 'last'; choose one"),
    ],
)
def test_a_split_or_checkpoint_of_another_name_is_refused(
    choice: dict[str, Any], message: str, run: Path
) -> None:
    """Any other name was once taken for the training split, or the latest checkpoint."""
    with pytest.raises(ConfigError, match=message):
        evaluate_run(run, **choice)


def test_deciles_are_added_on_request(run: Path) -> None:
    deciles = evaluate_run(run, deciles=True)["deciles"]
    assert len(deciles) == 10
    assert "PSP@5" in deciles[0]


def test_best_and_latest_checkpoint_can_be_chosen(run: Path) -> None:
    best, latest = evaluate_run(run), evaluate_run(run, which="latest")
    assert latest["checkpoint"] == "latest"
    assert latest["epoch"] == 8
    assert best["epoch"] <= 8


def test_a_copy_of_the_data_is_known_as_the_same(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "toy", tmp_path / "elsewhere")
    report = evaluate_run(run, tmp_path / "elsewhere")
    assert report["trained_on_this_data"]
    assert report["metrics"] == evaluate_run(run)["metrics"]


def test_other_data_are_measured_and_noted(run: Path, tmp_path: Path) -> None:
    other = problems.write_folder(tmp_path / "other", "text", train=30, test=40)
    report = evaluate_run(run, other)
    assert (report["data"], report["instances"]) == ("other", 40)
    assert not report["trained_on_this_data"]
    assert "this is not the data set that the run was trained on" in report_table(report)
    assert "this is not the data set" not in report_table(evaluate_run(run))


# ---- what does not fit -----------------------------------------------------------------------------------


def matrices(folder: Path, features: Any, labels: Any) -> Path:
    folder.mkdir()
    for prefix in ("trn", "tst"):
        scipy.sparse.save_npz(folder / f"{prefix}_X_Y.npz", scipy.sparse.csr_matrix(labels))
        if scipy.sparse.issparse(features):
            scipy.sparse.save_npz(folder / f"{prefix}_X_Xf.npz", scipy.sparse.csr_matrix(features))
        else:
            np.save(folder / f"{prefix}_X_Xf.npy", features)
    return folder


def test_data_with_other_labels_are_refused(runs_by_kind: dict[str, Path], tmp_path: Path) -> None:
    part = problems.split("sparse", 20)
    data = matrices(tmp_path / "other", part.features, part.labels[:, :23])
    with pytest.raises(DataError, match="other: the run knows 24 labels, found 23; evaluate on data with"):
        evaluate_run(runs_by_kind["sparse"], data)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_data_with_other_features_are_refused(
    kind: problems.Kind, runs_by_kind: dict[str, Path], tmp_path: Path
) -> None:
    """Fewer features were once taken for the first of the run's; more ended in an IndexError."""
    part = problems.split(kind, 20)
    width = part.features.shape[1]
    data = matrices(tmp_path / "other", part.features[:, : width - 1], part.labels)
    with pytest.raises(DataError, match=f"the run knows {width} features, found {width - 1}"):
        evaluate_run(runs_by_kind[kind], data)


@pytest.mark.parametrize("kind", problems.KINDS)
@pytest.mark.parametrize("other", problems.KINDS)
def test_data_of_another_kind_are_refused(kind: str, other: str, runs_by_kind: dict[str, Path]) -> None:
    data = runs_by_kind[other].parent / "toy"
    if kind == other:
        evaluate_run(runs_by_kind[kind], data)
    else:
        with pytest.raises(DataError, match=f"the run takes {kind} instances, found {other} ones"):
            evaluate_run(runs_by_kind[kind], data)


def test_data_without_a_test_split_are_refused(run: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "toy", "text")
    (data / "tst.json").unlink()
    with pytest.raises(DataError, match="toy: evaluation needs a test split, found none; use --split train"):
        evaluate_run(run, data)
    assert evaluate_run(run, data, split="train")["instances"] == 200


def test_a_run_on_arrays_needs_to_be_told_its_data(tmp_path: Path) -> None:
    train_into(tmp_path / "run", problems.dataset("dense"), problems.config(training={"epochs": 1}))
    with pytest.raises(DataError, match="the run was trained on arrays in memory; name a data set"):
        evaluate_run(tmp_path / "run")


def test_data_that_have_gone_are_named(run: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "toy", "text", train=30)
    train_into(tmp_path / "run", open_dataset(data), problems.config(training={"epochs": 1}))
    shutil.rmtree(data)
    with pytest.raises(DataError, match="toy: must be a folder"):
        evaluate_run(tmp_path / "run")


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: must be the folder of a run, found no such folder"):
        evaluate_run(tmp_path / "none")


# ---- the table -------------------------------------------------------------------------------------------


def test_the_table_shows_percent_at_1_3_5_and_k(run: Path) -> None:
    report = evaluate_run(run, k=7, deciles=True)
    lines = report_table(report).splitlines()
    assert lines[0].startswith("toy, test: 50 instances (5 without labels, counted as zeros), 24 labels")
    assert lines[1] == f"filter pairs masked: 3; propensities: A = 0.55, B = 1.5; epoch {report['epoch']}"
    assert lines[3].split() == ["percent", "@1", "@3", "@5", "@7"]
    row = next(line for line in lines if line.startswith("nDCG"))
    expected = [f"{100 * report['metrics'][f'nDCG@{rank}']:.2f}" for rank in (1, 3, 5, 7)]
    assert row.split()[1:] == expected
    header = next(place for place, line in enumerate(lines) if line.startswith("decile"))
    assert lines[header].split() == ["decile", "labels", "P@1", "P@5", "PSP@5", "R@5", "coverage@5"]
    assert [line.split()[0] for line in lines[header + 1 : header + 11]] == [str(n) for n in range(1, 11)]


def test_a_table_of_one_rank_is_no_error(run: Path) -> None:
    assert "@1" in report_table(evaluate_run(run, k=1, deciles=True))


def test_a_test_set_of_nothing_gives_zeros(tmp_path: Path) -> None:
    part = problems.split("dense", 30)
    dataset = Dataset.from_arrays(
        part.features, part.labels, test_features=part.features[:0], test_labels=part.labels[:0]
    )
    train_into(tmp_path / "run", dataset, problems.config(training={"epochs": 1}))
    data = matrices(tmp_path / "data", part.features, part.labels)
    np.save(data / "tst_X_Xf.npy", part.features[:0])
    scipy.sparse.save_npz(data / "tst_X_Y.npz", scipy.sparse.csr_matrix(part.labels[:0]))
    report = evaluate_run(tmp_path / "run", data, deciles=True)
    assert report["instances"] == 0
    assert set(report["metrics"].values()) == {0.0}
    report_table(report)
