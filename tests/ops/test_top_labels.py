"""top_labels against hand values, the sort of its own logits, and float64 truth; ties, NaN and infinities."""

import math
from dataclasses import replace

import oracles
import pytest
import torch
from oracles import SHAPES, Problem, Shape
from torch import Tensor

from xmlc.ops import sparse_linear, top_labels, top_labels_reference


def by_bias(bias: Tensor, batch: int, fan_in: int = 1) -> Problem:
    """Return a problem whose logits are the biases, for every instance."""
    label = len(bias)
    return Problem(
        features=torch.ones(fan_in, batch),
        weight=torch.zeros(label, fan_in),
        indices=torch.arange(fan_in, dtype=torch.int32).repeat(label, 1),
        bias=bias.to(torch.float32),
        offsets=torch.zeros(batch + 1, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )


def ks(label: int) -> list[int]:
    return sorted({1, min(5, label), min(100, label), min(1009, label)})


def test_labels_and_scores_have_their_hand_values(backend: str) -> None:
    problem = by_bias(torch.tensor([0.5, 3.0, -1.0, 3.0, 2.0]), batch=2)
    problem.features[0, 1] = 2.0
    problem.weight[2, 0] = 2.0  # logits of label 2: 1 and 3
    scores, labels = top_labels(*problem.layer[:4], k=4)
    assert scores.tolist() == [[3.0, 3.0, 2.0, 1.0], [3.0, 3.0, 3.0, 2.0]]
    assert labels.tolist() == [[1, 3, 4, 2], [1, 2, 3, 4]]
    assert scores.dtype == torch.float32 and labels.dtype == torch.int64


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_stable_sort_of_the_logits(backend: str, shape: Shape) -> None:
    features, weight, indices, bias, group_size = oracles.shape_problem(shape).layer
    logits = sparse_linear(features, weight, indices, bias, group_size)
    for k in ks(shape.label):
        scores, labels = top_labels(features, weight, indices, bias, k, group_size)
        sorted_scores, sorted_labels = oracles.top(logits, k)
        assert torch.equal(labels, sorted_labels)
        assert torch.equal(scores, sorted_scores)


@pytest.mark.parametrize("shape", SHAPES[::5], ids=str)
def test_scores_and_choice_are_exact_within_the_budget_of_the_logits(backend: str, shape: Shape) -> None:
    problem = oracles.shape_problem(shape)
    features, weight, indices, bias, group_size = problem.layer
    exact = oracles.logits(features.double(), weight.double(), indices, bias.double(), group_size)
    bound = oracles.logits_bound(problem)
    k = min(5, shape.label)
    scores, labels = top_labels(features, weight, indices, bias, k, group_size)
    oracles.assert_within(scores, exact.T.gather(1, labels), bound.T.gather(1, labels), "scores")
    assert bool((scores.diff(dim=1) <= 0).all())
    left_out = torch.ones_like(exact.T, dtype=torch.bool).scatter(1, labels, False)
    excess = exact.T - bound.T - scores[:, -1:].double()
    assert bool((excess[left_out] <= 0.0).all())


@pytest.mark.parametrize("distinct", [1, 3, 1000])
@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("thread_count", [1, 2, 3, 5])
def test_ties_go_to_the_lowest_label_across_blocks_and_threads(
    backend: str, distinct: int, batch: int, thread_count: int
) -> None:
    bias = torch.arange(20_011) * 7919 % distinct  # every score of many labels all over the layer
    problem = by_bias(bias, batch, fan_in=4)
    with oracles.threads(thread_count):
        scores, labels = top_labels(*problem.layer[:4], k=50)
    expected_scores, expected_labels = oracles.top(problem.bias[:, None], 50)
    assert torch.equal(labels, expected_labels.expand(batch, -1))
    assert torch.equal(scores, expected_scores.expand(batch, -1))


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_rising_and_a_falling_order_of_labels_are_both_sorted(backend: str, thread_count: int) -> None:
    rising = torch.arange(20_000) // 2  # in pairs of ties
    for bias in (rising, rising.flip(0)):
        problem = by_bias(bias, batch=64, fan_in=4)
        with oracles.threads(thread_count):
            scores, labels = top_labels(*problem.layer[:4], k=300)
        expected_scores, expected_labels = oracles.top(problem.bias[:, None], 300)
        assert torch.equal(labels, expected_labels.expand(64, -1))
        assert torch.equal(scores, expected_scores.expand(64, -1))


@pytest.mark.parametrize("k", [1, 20, 3001])
def test_every_k_up_to_the_number_of_labels_is_a_prefix_of_the_whole_order(backend: str, k: int) -> None:
    problem = oracles.make_problem(label=3001, fan_in=3, batch=17)
    whole = top_labels(*problem.layer[:4], k=3001)
    assert sorted(whole[1][0].tolist()) == list(range(3001))
    for found, expected in zip(top_labels(*problem.layer[:4], k=k), whole, strict=True):
        assert torch.equal(found, expected[:, :k])


def test_zero_and_minus_zero_are_a_tie(backend: str) -> None:
    bias = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0])
    problem = by_bias(bias, batch=3)
    problem.weight.fill_(-0.0)
    _, labels = top_labels(*problem.layer[:4], k=5)
    assert labels.tolist() == [[1, 2, 3, 4, 0]] * 3


def assert_sorted_like_the_oracle(problem: Problem, k: int) -> None:
    scores, labels = top_labels(*problem.layer[:4], k=k)
    expected_scores, expected_labels = oracles.top(sparse_linear(*problem.layer), k)
    assert torch.equal(labels, expected_labels)
    assert torch.equal(scores, expected_scores)


@pytest.mark.parametrize("special", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("k", [1, 6, 65])
def test_nan_and_minus_infinity_are_never_taken_and_infinity_first(
    backend: str, special: float, k: int
) -> None:
    problem = oracles.make_problem(batch=17)
    problem.bias[[0, 7, 8, 63, 64]] = special
    assert_sorted_like_the_oracle(problem, k)
    scores, labels = top_labels(*problem.layer[:4], k=65)
    if special == math.inf:
        assert labels[:, :5].tolist() == [[0, 7, 8, 63, 64]] * 17
    else:
        assert not scores.isnan().any()
        assert labels[:, 60:].tolist() == [[-1] * 5] * 17
        assert scores[:, 60:].tolist() == [[-math.inf] * 5] * 17


@pytest.mark.parametrize("special", [math.nan, -math.inf])
def test_an_instance_of_nothing_but_nan_or_minus_infinity_gets_no_label(backend: str, special: float) -> None:
    problem = by_bias(torch.ones(1000), batch=33)
    problem.weight.fill_(1.0)
    problem.features[0, 20] = special
    scores, labels = top_labels(*problem.layer[:4], k=3)
    assert labels.tolist() == [[-1] * 3 if b == 20 else [0, 1, 2] for b in range(33)]
    assert scores.tolist() == [[-math.inf if b == 20 else 2.0] * 3 for b in range(33)]


def test_nan_in_one_label_s_weights_spoils_that_label_only(backend: str) -> None:
    problem = oracles.make_problem(batch=17)
    problem.weight[40, 3] = math.nan
    assert_sorted_like_the_oracle(problem, 65)


def test_it_stands_outside_autograd(backend: str) -> None:
    problem = oracles.make_problem()
    problem = replace(problem, weight=problem.weight.requires_grad_())
    scores, labels = top_labels(*problem.layer[:4], k=5)
    assert not scores.requires_grad and not labels.requires_grad


@pytest.mark.parametrize("shape", SHAPES[:9], ids=str)
def test_the_package_reference_is_the_sort_of_the_dense_logits(shape: Shape) -> None:
    features, weight, indices, bias, group_size = oracles.shape_problem(shape).layer
    wide = (features.double(), weight.double(), indices, bias.double())
    scores, labels = top_labels_reference(*wide, k=min(5, shape.label), group_size=group_size)
    expected_scores, expected_labels = oracles.top(oracles.logits(*wide, group_size), min(5, shape.label))
    torch.testing.assert_close(scores, expected_scores, rtol=1e-13, atol=1e-13)
    assert torch.equal(labels, expected_labels)
