"""sparse_linear and its gradients against hand values, float64 dense truth and plain float32."""

from dataclasses import replace
from functools import cache
from itertools import product

import oracles
import pytest
import torch
from oracles import BFLOAT16, SHAPES, UNIT, Problem, Shape
from torch import Tensor

from xmlc.ops import dense_weight, sparse_linear, sparse_linear_reference

NAMES = ("features", "weight", "bias")


@cache
def logit_gradient(shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape.label, shape.batch, generator=generator)


@cache
def exact(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits and the gradients of features, weight, bias by dense algebra in this dtype."""
    problem = oracles.shape_problem(shape)
    leaves = [
        value.detach().to(dtype, copy=True).requires_grad_()
        for value in (problem.features, problem.weight, problem.bias)
    ]
    features, weight, bias = leaves
    logits = oracles.logits(features, weight, problem.indices, bias, problem.group_size)
    return logits.detach(), *torch.autograd.grad(logits, leaves, logit_gradient(shape).to(dtype))


def with_gradient(problem: Problem, *names: str) -> Problem:
    """Return a copy of which these tensors want a gradient."""
    copy = problem.copy()
    for name in names:
        getattr(copy, name).requires_grad_()
    return copy


@cache
def truth_bounds(shape: Shape) -> tuple[Tensor, ...]:
    problem = oracles.shape_problem(shape)
    gradient = logit_gradient(shape).double()
    return oracles.logits_bound(problem), *oracles.contraction_bounds(
        problem, gradient, torch.zeros_like(gradient)
    )


def one_label(fan_in: int, **changes: Tensor) -> Problem:
    """Return a problem of one label whose inputs are 0, 1, …, with all weights 1 and bias 0."""
    problem = Problem(
        features=torch.ones(fan_in, 1),
        weight=torch.ones(1, fan_in),
        indices=torch.arange(fan_in, dtype=torch.int32)[None],
        bias=torch.zeros(1),
        offsets=torch.zeros(2, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )
    return replace(problem, **changes)


HAND = Problem(
    features=torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 1.0]]),
    weight=torch.tensor([[0.5, 1.0], [-1.0, 0.25]]),
    indices=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
    bias=torch.tensor([0.0, -0.5]),
    offsets=torch.tensor([0, 1, 2]),
    labels=torch.tensor([0, 1]),
)


def test_logits_have_their_hand_values(backend: str) -> None:
    assert sparse_linear(*HAND.layer).tolist() == [[0.5, 0.0], [-3.25, -1.0]]


def test_gradients_have_their_hand_values(backend: str) -> None:
    problem = with_gradient(HAND, *NAMES)
    sparse_linear(*problem.layer).backward(torch.tensor([[-0.5, 1.0], [0.0, -2.0]]))
    assert problem.features.grad.tolist() == [[-0.25, 0.0], [-0.5, 1.0], [0.0, 2.0]]
    assert problem.weight.grad.tolist() == [[1.5, -1.0], [-2.0, -4.0]]
    assert problem.bias.grad.tolist() == [0.5, -2.0]


def test_labels_of_a_group_share_inputs_and_keep_their_weights(backend: str) -> None:
    features = torch.tensor([[1.0], [10.0], [100.0]])
    weight = torch.arange(1.0, 18.0)[:, None].repeat(1, 2)
    indices = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)  # labels 0 to 15, and label 16
    logits = sparse_linear(features, weight, indices, torch.zeros(17), group_size=16)
    assert logits[:, 0].tolist() == [11.0 * label for label in range(1, 17)] + [110.0 * 17]


def test_duplicate_inputs_of_a_label_add(backend: str) -> None:
    weight = torch.tensor([[1.0, 10.0, 100.0]])
    problem = one_label(3, indices=torch.tensor([[1, 0, 1]], dtype=torch.int32), weight=weight)
    problem = with_gradient(replace(problem, features=torch.tensor([[2.0], [3.0], [5.0]])), *NAMES)
    logits = sparse_linear(*problem.layer)
    logits.backward(torch.ones(1, 1))
    assert logits.tolist() == [[3.0 + 20.0 + 300.0]]
    assert problem.features.grad.tolist() == [[10.0], [101.0], [0.0]]
    assert problem.weight.grad.tolist() == [[3.0, 2.0, 3.0]]


def test_duplicate_inputs_of_a_group_add(backend: str) -> None:
    # Sixteen labels of weights l + 1, and 10 times, 100 times that.
    weight = torch.arange(1.0, 17.0)[:, None] * torch.tensor([[1.0, 10.0, 100.0]])
    problem = one_label(3, indices=torch.tensor([[1, 0, 1]], dtype=torch.int32), weight=weight)
    problem = replace(
        problem, features=torch.tensor([[2.0], [3.0], [5.0]]), bias=torch.zeros(16), group_size=16
    )
    problem = with_gradient(problem, *NAMES)
    logits = sparse_linear(*problem.layer)
    logits.backward(torch.ones(16, 1))
    assert logits.flatten().tolist() == [323.0 * (label + 1) for label in range(16)]
    assert problem.features.grad.tolist() == [[1360.0], [136.0 * 101.0], [0.0]]
    assert problem.weight.grad.tolist() == [[3.0, 2.0, 3.0]] * 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_within_the_budget_of_the_exact_ones(backend: str, shape: Shape) -> None:
    problem = oracles.shape_problem(shape)
    found = sparse_linear(*problem.layer)
    assert found.dtype == torch.float32 and found.shape == (shape.label, shape.batch)
    truth, bound = exact(shape, torch.float64)[0], truth_bounds(shape)[0]
    oracles.assert_within(found, truth, bound, "logits")
    magnitude = bound / (shape.fan_in + 2)  # one unit of roundoff of the sum of magnitudes
    plain = exact(shape, torch.float32)[0]
    oracles.assert_no_worse_than_plain(found, truth, plain, magnitude, "logits")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_within_the_budget_of_the_exact_ones(backend: str, shape: Shape) -> None:
    problem = with_gradient(oracles.shape_problem(shape), *NAMES)
    sparse_linear(*problem.layer).backward(logit_gradient(shape))
    for position, name in enumerate(NAMES, start=1):
        found = getattr(problem, name).grad
        assert found.dtype == getattr(problem, name).dtype and found.shape == getattr(problem, name).shape
        truth, bound = exact(shape, torch.float64)[position], truth_bounds(shape)[position]
        if found.dtype == BFLOAT16:
            oracles.assert_within_rounded(found, truth, bound, name)
            continue
        oracles.assert_within(found, truth, bound, name)
        plain = exact(shape, torch.float32)[position]
        oracles.assert_no_worse_than_plain(found, truth, plain, bound / 3, name)  # bound >= 3 roundings


@pytest.mark.parametrize("needed", [names for names in product([False, True], repeat=3) if any(names)])
def test_each_gradient_is_the_same_whichever_others_are_wanted(
    backend: str, needed: tuple[bool, bool, bool]
) -> None:
    problem = oracles.make_problem()
    incoming = torch.randn(65, 33, generator=torch.Generator().manual_seed(1))
    every = with_gradient(problem, *NAMES)
    sparse_linear(*every.layer).backward(incoming)
    some = with_gradient(problem, *(name for name, wanted in zip(NAMES, needed, strict=True) if wanted))
    sparse_linear(*some.layer).backward(incoming)
    for name, wanted in zip(NAMES, needed, strict=True):
        gradient = getattr(some, name).grad
        assert (gradient is not None) == wanted
        if wanted:
            assert torch.equal(gradient, getattr(every, name).grad)


def test_no_graph_is_made_where_no_gradient_is_wanted(backend: str) -> None:
    assert not sparse_linear(*oracles.make_problem().layer).requires_grad


@pytest.mark.parametrize("incoming", ["transposed", "expanded"])
def test_an_incoming_gradient_need_not_be_contiguous(backend: str, incoming: str) -> None:
    problem = oracles.make_problem()
    if incoming == "transposed":
        gradient = torch.randn(33, 65, generator=torch.Generator().manual_seed(1)).T
    else:
        gradient = torch.ones(1, 1).expand(65, 33)
    assert not gradient.is_contiguous()
    strided, contiguous = with_gradient(problem, *NAMES), with_gradient(problem, *NAMES)
    sparse_linear(*strided.layer).backward(gradient)
    sparse_linear(*contiguous.layer).backward(gradient.contiguous())
    for name in ("features", "weight"):
        assert torch.equal(getattr(strided, name).grad, getattr(contiguous, name).grad)
    bound = oracles.gamma(33) * gradient.double().abs().sum(1)
    oracles.assert_within(strided.bias.grad, gradient.double().sum(1), bound + oracles.TINY)


def test_a_second_derivative_is_refused(backend: str) -> None:
    problem = with_gradient(oracles.make_problem(), *NAMES)
    (first,) = torch.autograd.grad(
        sparse_linear(*problem.layer).square().sum(), problem.features, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_weight_changed_in_place_before_backward_is_noticed(backend: str) -> None:
    problem = with_gradient(oracles.make_problem(), "features")
    logits = sparse_linear(*problem.layer)
    problem.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_layers_made_under_inference_mode_work(backend: str) -> None:
    problem = oracles.make_problem()
    with torch.inference_mode():
        made_inside = problem.copy()
        assert torch.equal(sparse_linear(*made_inside.layer), sparse_linear(*problem.layer))


@pytest.mark.parametrize("group_size", [1, 16])
def test_two_layers_of_half_the_labels_give_the_logits_of_the_whole(backend: str, group_size: int) -> None:
    problem = oracles.make_problem(label=101, group_size=group_size)
    cut = 48
    whole = sparse_linear(*problem.layer)
    parts = [
        sparse_linear(problem.features, weight, indices, bias, group_size)
        for weight, indices, bias in zip(
            problem.weight.tensor_split([cut]),
            problem.indices.tensor_split([cut // group_size]),
            problem.bias.tensor_split([cut]),
            strict=True,
        )
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_a_permuted_batch_gives_permuted_logits_and_feature_gradients(backend: str) -> None:
    problem = oracles.make_problem()
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(33, generator=generator)
    incoming = torch.randn(65, 33, generator=generator)
    permuted = replace(problem, features=problem.features[:, order].contiguous())
    problem, permuted = with_gradient(problem, "features"), with_gradient(permuted, "features")
    straight, turned = sparse_linear(*problem.layer), sparse_linear(*permuted.layer)
    straight.backward(incoming)
    turned.backward(incoming[:, order].contiguous())
    bound = 2.0 * oracles.logits_bound(problem)[:, order]  # two evaluations, each within the bound
    oracles.assert_within(turned, straight[:, order].double(), bound)
    zero = torch.zeros(65, 33, dtype=torch.float64)
    feature_bound, _, _ = oracles.contraction_bounds(problem, incoming.double(), zero)
    expected = problem.features.grad[:, order].double()
    oracles.assert_within(permuted.features.grad, expected, 2.0 * feature_bound[:, order])


@pytest.mark.parametrize("shape", SHAPES[:9], ids=str)
def test_the_package_reference_is_the_dense_product(shape: Shape) -> None:
    problem = oracles.shape_problem(shape)
    truth = oracles.dense(problem.weight.double(), problem.indices, shape.group_size, shape.input)
    found = dense_weight(problem.weight, problem.indices, shape.group_size, shape.input)
    assert found.dtype == shape.weight_dtype and torch.equal(found.double(), truth)
    wide = sparse_linear_reference(
        problem.features.double(), problem.weight.double(), problem.indices, problem.bias.double(),
        shape.group_size,
    )  # fmt: skip
    torch.testing.assert_close(wide, exact(shape, torch.float64)[0], rtol=1e-13, atol=UNIT**2)


@pytest.mark.parametrize("fan_in", [130, 1])
def test_infinite_features_stay_infinite(backend: str, fan_in: int) -> None:
    assert (
        sparse_linear(*one_label(fan_in, features=torch.full((fan_in, 1), torch.inf)).layer).item()
        == torch.inf
    )
