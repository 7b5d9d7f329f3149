"""Ranking and measuring against brute force over all logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest
import torch

from xmlc.data import BatchStream, CsrRows
from xmlc.evaluation import evaluate_model, rank_labels
from xmlc.nn import Model
from xmlc.training.prepare import prepare

INSTANCES = 50


def model_and_stream(kind: problems.Kind = "sparse", output: str = "sparse") -> tuple[Model, BatchStream]:
    dataset = problems.dataset(kind)
    config = problems.config(model={"output": output, "bottleneck": 9})
    model = Model(config, prepare(dataset, config).problem)
    assert dataset.test is not None
    assert dataset.test.features is not None
    return model, BatchStream(dataset.test.features, dataset.test.labels, np.arange(INSTANCES), 16, 0)


def pairs(rows: list[list[int]]) -> CsrRows:
    offsets = np.cumsum([0, *map(len, rows)])
    labels = np.array([label for row in rows for label in row], np.int32)
    return CsrRows(offsets, labels, None, problems.LABELS)


def random_pairs(seed: int, most: int) -> CsrRows:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, INSTANCES)
    return pairs([sorted(rng.choice(problems.LABELS, count, replace=False)) for count in counts])


def brute_force(model: Model, stream: BatchStream, k: int, masked: CsrRows) -> np.ndarray:
    """Rank all labels of one instance after the other and drop the masked ones."""
    top = np.full((INSTANCES, k), -1)
    for batch in BatchStream(stream.features, stream.labels, stream.rows, 1, 0).sequential():
        (row,) = batch.instances.tolist()
        order = model.top_labels(batch, problems.LABELS)[1][0].tolist()
        hidden = masked.indices[masked.offsets[row] : masked.offsets[row + 1]].tolist()
        kept = [label for label in order if label not in hidden][:k]
        top[row, : len(kept)] = kept
    return top


@pytest.mark.parametrize("k", [1, 5, 24])
@pytest.mark.parametrize("most", [0, 3, 24])
@pytest.mark.parametrize(
    ("kind", "output"), [("sparse", "sparse"), ("dense", "dense"), ("dense", "bottleneck")]
)
def test_masked_ranks_equal_brute_force(kind: problems.Kind, output: str, most: int, k: int) -> None:
    model, stream = model_and_stream(kind, output)
    masked = random_pairs(most, most)
    np.testing.assert_array_equal(
        rank_labels(model, stream, k, masked), brute_force(model, stream, k, masked)
    )


def test_without_a_filter_nothing_is_masked() -> None:
    model, stream = model_and_stream()
    nothing = pairs([[]] * INSTANCES)
    np.testing.assert_array_equal(rank_labels(model, stream, 5, None), brute_force(model, stream, 5, nothing))


@pytest.mark.parametrize("filter_pairs", [None, random_pairs(1, 2)])
def test_ranks_beyond_the_number_of_labels_are_empty(filter_pairs: CsrRows | None) -> None:
    model, stream = model_and_stream()
    top = rank_labels(model, stream, 40, filter_pairs)
    assert top.shape == (INSTANCES, 40)
    assert (top[:, problems.LABELS :] == -1).all()
    assert (top[:, :20] >= 0).all()


def test_a_row_with_every_label_masked_has_no_prediction() -> None:
    model, stream = model_and_stream()
    masked = pairs([list(range(problems.LABELS))] + [[]] * (INSTANCES - 1))
    top = rank_labels(model, stream, 5, masked)
    assert (top[0] == -1).all()
    assert (top[1:] >= 0).all()


def test_a_stream_of_nothing_gives_no_rows() -> None:
    model, stream = model_and_stream()
    empty = BatchStream(stream.features, stream.labels, np.arange(0), 16, 0)
    assert rank_labels(model, empty, 5, None).shape == (0, 5)
    assert evaluate_model(model, empty, 5, None).values["P@1"] == 0.0


def test_batches_do_not_change_ranks() -> None:
    model, stream = model_and_stream()
    single = BatchStream(stream.features, stream.labels, stream.rows, 1, 0)
    np.testing.assert_array_equal(rank_labels(model, stream, 5, None), rank_labels(model, single, 5, None))


def test_metrics_are_those_of_the_chosen_rows_in_their_order() -> None:
    model, stream = model_and_stream()
    rows = np.array([30, 2, 17, 9])
    chosen = BatchStream(stream.features, stream.labels, rows, 3, 0)
    report = evaluate_model(model, chosen, 3, None)
    top = rank_labels(model, stream, 3, None)[rows]
    truth = stream.labels.to_scipy().toarray()[rows] > 0
    for rank in (1, 2, 3):
        hits = [truth[row, label] for row in range(4) for label in top[row, :rank]]
        assert report.values[f"P@{rank}"] == pytest.approx(sum(hits) / (4 * rank))
    assert report.instances == 4
    assert report.unlabelled_instances == 1  # 9, as every tenth


def test_propensities_are_those_of_the_model_unless_given() -> None:
    model, stream = model_and_stream()
    own = evaluate_model(model, stream, 3, None).values
    same = evaluate_model(model, stream, 3, None, inverse_propensity=model.problem.inverse_propensity).values
    even = evaluate_model(model, stream, 3, None, inverse_propensity=np.ones(problems.LABELS)).values
    assert own == same
    assert even["PSP@1"] == pytest.approx(even["P@1"] / 0.9)  # 45 of 50 instances have a label to find
    assert own["PSP@1"] != even["PSP@1"]


def test_deciles_come_on_request() -> None:
    model, stream = model_and_stream()
    assert evaluate_model(model, stream, 3, None).deciles == ()
    deciles = evaluate_model(model, stream, 3, None, deciles=True).deciles
    assert len(deciles) == 10
    assert sum(decile["labels"] for decile in deciles) == problems.LABELS
    assert sum(decile["training_positives"] for decile in deciles) == model.problem.label_instances.sum()


def test_progress_sees_every_batch_once() -> None:
    model, stream = model_and_stream()
    seen: list[Any] = []

    def progress(batches: Any, total: int) -> Any:
        seen.append(total)
        for batch in batches:
            seen.append(len(batch.instances))
            yield batch

    rank_labels(model, stream, 3, None, progress)
    assert seen == [4, 16, 16, 16, 2]


def test_ranking_takes_no_gradient() -> None:
    model, stream = model_and_stream()
    scores, _ = model.top_labels(next(stream.sequential()), 3)
    assert not scores.requires_grad
    assert torch.is_grad_enabled()
