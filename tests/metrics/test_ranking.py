"""Ranking metrics against recorded values, hand values and a plain-Python oracle."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from xmlc.errors import DataError
from xmlc.metrics import DECILES, Report, evaluate, label_deciles, mask_pairs

ORACLE = Path(__file__).parents[1] / "data" / "metrics-oracle"
RECORDED = json.loads((ORACLE / "values.json").read_text())
RECORDED_NAMES = {
    "precision": "P",
    "ndcg": "nDCG",
    "recall": "R",
    "psprecision": "PSP",
    "psndcg": "PSnDCG",
    "psrecall": "PSR",
}


def csr(rows: list[list[int]], labels: int) -> sparse.csr_array:
    """Build CSR [instance, label] from each instance's labels, exactly as listed."""
    indptr = np.cumsum([0] + [len(row) for row in rows])
    indices = np.array([label for row in rows for label in row], dtype=np.int32)
    return sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(len(rows), labels))


def tops(rows: list[list[int]], columns: int | None = None) -> np.ndarray:
    """Build top_labels [instance, columns], padded with -1."""
    columns = max(map(len, rows), default=0) if columns is None else columns
    padded = [row + [-1] * (columns - len(row)) for row in rows]
    return np.array(padded, dtype=np.int64).reshape(len(rows), columns)


# ---- recorded values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["pyxclib", "napkinxc"])
@pytest.mark.parametrize("case", RECORDED)
def test_every_metric_equals_the_recorded_values(case: str, source: str) -> None:
    arrays = np.load(ORACLE / f"{case}.npz")
    indices = arrays["truth_indices"]
    truth = sparse.csr_array(
        (np.ones(len(indices)), indices, arrays["truth_indptr"]), shape=tuple(arrays["shape"])
    )

    report = evaluate(truth, arrays["top_labels"], 5, inverse_propensity=arrays["inverse_propensity"])

    assert report.instances == RECORDED[case]["instances"]
    assert report.unlabelled_instances == RECORDED[case]["unlabelled_instances"]
    for recorded_name, name in RECORDED_NAMES.items():
        found = [report.values[f"{name}@{rank}"] for rank in range(1, 6)]
        recorded = RECORDED[case]["values_at_1_to_5"][recorded_name][source]
        np.testing.assert_allclose(found, recorded, rtol=0, atol=1e-6, err_msg=name)


# ---- hand values -----------------------------------------------------------------------------------------


def test_psp_divides_by_the_best_ranking_by_inverse_propensity() -> None:
    weights = np.array([4.0, 5.0, 6.0, 1.0, 2.0, 3.0])

    values = evaluate(csr([[0, 1, 2, 3, 4, 5]], 6), tops([[3, 4, 5]]), 3, inverse_propensity=weights).values

    assert values["P@3"] == 1.0
    assert values["PSP@3"] == pytest.approx(6 / 15, abs=1e-15)


def test_one_hit_among_four_true_labels_is_full_precision_and_a_quarter_of_recall() -> None:
    values = evaluate(csr([[0, 1, 2, 3]], 5), tops([[2]]), 1).values

    assert values["P@1"] == 1.0
    assert values["R@1"] == 0.25


def test_ndcg_discounts_by_rank_and_normalises_by_the_labels_there_are() -> None:
    values = evaluate(csr([[1], [0, 2]], 4), tops([[0, 1], [0, 3]]), 2).values

    second = 1 / math.log2(3)
    assert values["nDCG@1"] == pytest.approx((0 + 1) / 2)
    assert values["nDCG@2"] == pytest.approx((second / 1 + 1 / (1 + second)) / 2)


def test_coverage_counts_labels_that_occur_in_the_truth() -> None:
    # Labels 0, 1, 2 occur; label 0 is hit at rank 1, label 2 at rank 2; label 3 never occurs.
    values = evaluate(csr([[0, 1], [0], [2]], 4), tops([[0, 3], [0, 1], [3, 2]]), 2).values

    assert values["coverage@1"] == pytest.approx(1 / 3)
    assert values["coverage@2"] == pytest.approx(2 / 3)


def test_macro_precision_averages_over_all_labels_and_counts_unpredicted_ones_as_zero() -> None:
    # Rank 1: label 0 is right once of twice, label 1 once of once, labels 2 and 3 are never predicted.
    values = evaluate(csr([[0], [1], [2]], 4), tops([[0], [1], [0]]), 1).values

    assert values["macroP@1"] == pytest.approx((1 / 2 + 1) / 4)


def test_a_perfect_ranking_scores_one_everywhere_it_can() -> None:
    rows = [[0, 1, 2], [2, 1, 0]]
    weights = np.array([3.0, 2.0, 1.0])

    values = evaluate(csr(rows, 3), tops([[0, 1, 2], [0, 1, 2]]), 3, inverse_propensity=weights).values

    below_one = {"R@1": 1 / 3, "R@2": 2 / 3, "PSR@3": 1.0, "coverage@1": 1 / 3, "coverage@2": 2 / 3}
    below_one |= {"macroP@1": 1 / 3, "macroP@2": 2 / 3}
    for name, value in values.items():
        assert value == pytest.approx(below_one.get(name, 1.0)), name


# ---- a plain-Python oracle -------------------------------------------------------------------------------


def brute_force(
    truth: list[set[int]], ranked: list[list[int]], labels: set[int], k: int, weights: list[float]
) -> dict[str, float]:
    """Every metric by its definition, with the truth restricted to ``labels``."""
    truth = [row & labels for row in truth]
    instances = max(len(truth), 1)
    values: dict[str, float] = {}

    def mean_gains(rows: list[list[float]], at: int) -> dict[str, float]:
        sums = {"P": 0.0, "nDCG": 0.0, "R": 0.0}
        for gains, true in zip(rows, truth, strict=True):
            if true:
                best = sum(1 / math.log2(rank + 1) for rank in range(1, min(at, len(true)) + 1))
                sums["P"] += sum(gains[:at]) / at
                sums["nDCG"] += sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:at])) / best
                sums["R"] += sum(gains[:at]) / len(true)
        return {name: total / instances for name, total in sums.items()}

    for at in range(1, k + 1):
        shown = [row[:at] for row in ranked]
        hits = [[float(label in true) for label in row] for row, true in zip(shown, truth, strict=True)]
        scored = [
            [hit * weights[label] for hit, label in zip(row_hits, row, strict=True)]
            for row_hits, row in zip(hits, shown, strict=True)
        ]
        best = [sorted((weights[label] for label in true), reverse=True) for true in truth]
        values |= {f"{name}@{at}": value for name, value in mean_gains(hits, at).items()}
        ideal = mean_gains(best, at)
        for name, value in mean_gains(scored, at).items():
            values[f"PS{name}@{at}"] = value / ideal[name] if ideal[name] else 0.0
        precisions = []
        covered = 0
        for label in labels:
            places = [row for row, found in enumerate(shown) if label in found]
            right = sum(label in truth[row] for row in places)
            covered += right > 0
            precisions.append(right / len(places) if places else 0.0)
        occurring = set().union(*truth)
        values[f"coverage@{at}"] = covered / len(occurring) if occurring else 0.0
        values[f"macroP@{at}"] = sum(precisions) / len(labels) if labels else 0.0
    return values


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw small awkward problems: no instances, empty rows, one label, k beyond the labels, gaps."""
    labels = draw(st.integers(1, 8))
    instances = draw(st.integers(0, 6))
    label = st.integers(0, labels - 1)
    truth = draw(st.lists(st.lists(label, max_size=6), min_size=instances, max_size=instances))
    columns = draw(st.integers(0, 6))
    ranked = []
    for _ in range(instances):
        order = draw(st.permutations(range(labels)))
        gaps = draw(st.lists(st.booleans(), min_size=columns, max_size=columns))
        ranked.append([-1 if gap else next_label for gap, next_label in zip(gaps, order, strict=False)])
    weights = draw(st.lists(st.floats(0.01, 100), min_size=labels, max_size=labels))
    counts = draw(st.lists(st.integers(0, 20), min_size=labels, max_size=labels))
    return {
        "labels": labels,
        "truth": truth,
        "ranked": ranked,
        "columns": columns,
        "k": draw(st.integers(1, 7)),
        "weights": weights,
        "counts": counts,
    }


@given(problems())
def test_every_metric_equals_a_plain_python_oracle(problem: dict[str, Any]) -> None:
    k, labels, weights = problem["k"], problem["labels"], problem["weights"]
    counts = np.array(problem["counts"])
    truth = [set(row) for row in problem["truth"]]
    gap = labels  # an id that is never true and weighs nothing
    ranked = [[gap if label < 0 else label for label in row] for row in problem["ranked"]]

    report = evaluate(
        csr(problem["truth"], labels),
        tops(problem["ranked"], problem["columns"]),
        k,
        inverse_propensity=np.array(weights),
        train_counts=counts,
    )

    expected = brute_force(truth, ranked, set(range(labels)), k, [*weights, 0.0])
    assert report.values == pytest.approx(expected, abs=1e-12)
    assert report.instances == len(truth)
    assert report.unlabelled_instances == sum(not row for row in truth)
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in report.values.values())
    decile_of = label_deciles(counts)
    assert len(report.deciles) == DECILES
    for number, decile in enumerate(report.deciles):
        members = {label for label in range(labels) if decile_of[label] == number}
        expected = brute_force(truth, ranked, members, k, [*weights, 0.0])
        expected["labels"] = len(members)
        expected["training_positives"] = sum(problem["counts"][label] for label in members)
        expected["unlabelled_instances"] = sum(not row & members for row in truth)
        assert decile == pytest.approx(expected, abs=1e-12)


# ---- edges -----------------------------------------------------------------------------------------------


def test_the_structure_of_the_truth_counts_not_its_values() -> None:
    stored_zero_and_repeat = sparse.csr_array(
        (np.array([0.0, -3.0, 1.0]), np.array([2, 0, 0], dtype=np.int32), np.array([0, 3])), shape=(1, 3)
    )

    values = evaluate(stored_zero_and_repeat, tops([[2, 0]]), 2).values

    assert values["P@2"] == 1.0
    assert values["R@2"] == 1.0


def test_evaluation_changes_none_of_its_arguments() -> None:
    truth = csr([[2, 0, 0]], 3)
    top_labels = tops([[2, -1]])

    evaluate(truth, top_labels, 3, inverse_propensity=np.ones(3), train_counts=np.arange(3))

    np.testing.assert_array_equal(truth.indices, [2, 0, 0])
    np.testing.assert_array_equal(top_labels, [[2, -1]])


@pytest.mark.parametrize("rows", [[[], [], []], []], ids=["all unlabelled", "no instances"])
def test_without_any_true_label_everything_is_zero_and_never_nan(rows: list[list[int]]) -> None:
    report = evaluate(
        csr(rows, 4),
        tops([[0, 1] for _ in rows], 2),
        2,
        inverse_propensity=np.ones(4),
        train_counts=np.ones(4, int),
    )

    assert set(report.values.values()) == {0.0}
    assert report.unlabelled_instances == len(rows)
    assert all(decile[f"PSP@{rank}"] == 0.0 for decile in report.deciles for rank in (1, 2))


def test_a_data_set_without_labels_is_all_zeros() -> None:
    report = evaluate(
        csr([[], []], 0), tops([[], []], 0), 2, inverse_propensity=np.ones(0), train_counts=np.ones(0, int)
    )

    assert set(report.values.values()) == {0.0}


def test_unlabelled_instances_keep_their_row() -> None:
    report = evaluate(csr([[0], []], 2), tops([[0], [0]]), 1)

    assert report.values["P@1"] == 0.5
    assert report.unlabelled_instances == 1


def test_ranks_beyond_the_number_of_labels_count_as_misses() -> None:
    values = evaluate(csr([[0, 1]], 2), tops([[1, 0]]), 4).values

    assert values["P@4"] == 0.5
    assert values["R@4"] == values["nDCG@4"] == 1.0


def test_columns_beyond_k_are_ignored() -> None:
    narrow = evaluate(csr([[0, 1]], 3), tops([[2]]), 1)

    assert evaluate(csr([[0, 1]], 3), tops([[2, 0, 1]]), 1) == narrow


def test_a_rank_without_prediction_is_a_miss_at_that_rank() -> None:
    values = evaluate(csr([[0, 1]], 3), tops([[-1, 0]]), 2).values

    assert values["P@1"] == 0.0
    assert values["P@2"] == 0.5


def test_label_ids_beyond_32_bit_pairs_do_not_overflow() -> None:
    # instance * labels + label passes 2^31 here; 32-bit CSR indices must not decide the type.
    labels, last = 3_000_000, 2_999_999
    rows = [[last]] * 1000

    assert evaluate(csr(rows, labels), tops(rows), 1).values["P@1"] == 1.0


def test_a_report_is_json() -> None:
    report = evaluate(
        csr([[0], []], 2), tops([[0], [0]]), 1, inverse_propensity=np.ones(2), train_counts=np.array([1, 2])
    )

    rebuilt = json.loads(json.dumps(report.to_dict()))
    assert Report(**{**rebuilt, "deciles": tuple(rebuilt["deciles"])}) == report


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [-2, 3])
def test_a_label_out_of_range_is_refused_with_its_place(outside: int) -> None:
    with pytest.raises(DataError, match=rf"found {outside} at \[1, 0\]"):
        evaluate(csr([[0], [1]], 3), tops([[0], [outside]]), 1)


def test_a_label_predicted_twice_is_refused() -> None:
    with pytest.raises(DataError, match="found label 2 twice in row 1"):
        evaluate(csr([[0], [1]], 3), tops([[0, 1, 2], [2, 0, 2]]), 3)


def test_a_repeat_beyond_k_is_not_looked_at() -> None:
    assert evaluate(csr([[2]], 3), tops([[2, 0, 2]]), 2).values["P@1"] == 1.0


@pytest.mark.parametrize(
    "top_labels",
    [np.zeros((3, 1), int), np.zeros(2, int), np.zeros((2, 1))],
    ids=["other instances", "vector", "float"],
)
def test_predictions_that_do_not_fit_the_truth_are_refused(top_labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="top_labels must be integers"):
        evaluate(csr([[0], [1]], 3), top_labels, 1)


def test_k_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="k must be at least 1"):
        evaluate(csr([[0]], 3), tops([[0]]), 0)


@pytest.mark.parametrize("truth", [np.eye(2), sparse.csc_array(np.eye(2))], ids=["dense", "csc"])
def test_truth_in_another_form_than_csr_is_refused(truth: Any) -> None:
    with pytest.raises(DataError, match="truth must be a scipy CSR matrix"):
        evaluate(truth, tops([[0], [1]]), 1)


def test_truth_with_a_label_out_of_range_is_refused() -> None:
    truth = csr([[0], [1]], 3)
    truth.indices[1] = 3

    with pytest.raises(DataError, match=r"truth must hold label ids in \[0, 3\), found \[0, 3\]"):
        evaluate(truth, tops([[0], [1]]), 1)


@pytest.mark.parametrize("weights", [np.ones(2), np.array([1.0, 0.0, 1.0]), np.array([1.0, np.nan, 1.0])])
def test_unusable_inverse_propensities_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(DataError, match="inverse_propensity must be"):
        evaluate(csr([[0]], 3), tops([[0]]), 1, inverse_propensity=weights)


@pytest.mark.parametrize("counts", [np.ones(2, int), np.array([1, -1, 1]), np.ones(3)])
def test_unusable_training_counts_are_refused(counts: np.ndarray) -> None:
    with pytest.raises(DataError, match="train_counts must be"):
        evaluate(csr([[0]], 3), tops([[0]]), 1, train_counts=counts)


# ---- deciles ---------------------------------------------------------------------------------------------


def test_deciles_hold_about_equal_numbers_of_training_positives() -> None:
    counts = np.maximum(1, 1000 // np.arange(1, 5001))
    positives = np.bincount(label_deciles(counts), weights=counts)

    # A decile starts at the first label past its bound, so it is off by at most one label on either side.
    assert len(positives) == DECILES
    assert np.abs(positives - counts.sum() / DECILES).max() <= counts.max()


def test_deciles_run_from_frequent_to_rare_labels_and_ties_go_by_id() -> None:
    counts = np.array([1, 5, 1, 1, 1, 1])

    np.testing.assert_array_equal(label_deciles(counts), [5, 0, 6, 7, 8, 9])


def test_labels_without_training_positives_are_in_the_last_decile() -> None:
    assert label_deciles(np.array([0, 7, 0]))[[0, 2]].tolist() == [9, 9]
    assert label_deciles(np.zeros(3, int)).tolist() == [9, 9, 9]


def test_precision_of_the_deciles_sums_to_the_whole() -> None:
    random = np.random.default_rng(5)
    labels = 50
    rows = [random.choice(labels, size=random.integers(0, 6), replace=False).tolist() for _ in range(40)]
    top_labels = np.array([random.permutation(labels)[:5] for _ in rows])
    counts = random.integers(0, 30, labels)

    report = evaluate(csr(rows, labels), top_labels, 5, train_counts=counts)

    for rank in range(1, 6):
        total = sum(decile[f"P@{rank}"] for decile in report.deciles)
        assert total == pytest.approx(report.values[f"P@{rank}"], abs=1e-12)


# ---- masking ---------------------------------------------------------------------------------------------


def test_masked_pairs_vanish_and_the_rest_move_up() -> None:
    candidates = tops([[4, 2, 0, 1], [4, 2, 0, 1], [3, -1, 1, 0]])

    masked = mask_pairs(candidates, csr([[2, 4], [], [3, 0]], 5), 3)

    np.testing.assert_array_equal(masked, [[0, 1, -1], [4, 2, 0], [1, -1, -1]])


def test_masking_fills_up_to_k_with_no_prediction() -> None:
    np.testing.assert_array_equal(mask_pairs(tops([[1]]), csr([[0]], 2), 3), [[1, -1, -1]])


@given(problems())
def test_masking_equals_a_plain_python_filter(problem: dict[str, Any]) -> None:
    k = problem["k"]
    masked = mask_pairs(
        tops(problem["ranked"], problem["columns"]), csr(problem["truth"], problem["labels"]), k
    )

    kept = [
        [label for label in row if label >= 0 and label not in pairs][:k]
        for row, pairs in zip(problem["ranked"], problem["truth"], strict=True)
    ]
    np.testing.assert_array_equal(masked, tops(kept, k))


def test_masking_refuses_a_filter_of_other_instances() -> None:
    with pytest.raises(DataError, match="mask_pairs: top_labels must be integers"):
        mask_pairs(tops([[0]]), csr([[0], [1]], 2), 1)


def test_masking_refuses_a_label_out_of_range() -> None:
    with pytest.raises(DataError, match="mask_pairs: top_labels must be label ids"):
        mask_pairs(tops([[2]]), csr([[0]], 2), 1)
