"""Features in bfloat16: as exact as in float32; products on tensor cores round the logit gradients alone.

On the emulator the tensor cores are the plain twin, whose elements lie where the instruction has them. Those
of a GPU may cut the last bits of sums, which the twin rounds: `scripts/device_check` compares there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from oracles import BFLOAT16, SHAPES, Problem, Shape
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.ops import LogitOffsets, OptimizerState, fused_step, sparse_linear, top_labels

SHAPES_OF_BFLOAT16 = [
    *(shape for shape in SHAPES if shape.weight_dtype == BFLOAT16 and shape.label * shape.batch < 100_000),
    # Whole runs of memory, ends of groups, more than 64 connections and instances.
    Shape(33, 16, 64, 64, 16, BFLOAT16, torch.uint16),
    Shape(100, 66, 130, 72, 32, BFLOAT16, torch.int32),
    Shape(64, 40, 96, 136, 64, BFLOAT16, torch.uint16),
    Shape(17, 6, 30, 9, 16, BFLOAT16, torch.int32),
    Shape(1009, 20, 300, 40, 16, BFLOAT16, torch.uint16),
]


def problem_of(shape: Shape) -> Problem:
    """Return the shape's problem with features that bfloat16 holds, still in float32 for the truth."""
    problem = oracles.shape_problem(shape)
    return replace(problem, features=problem.features.bfloat16().float())


def by_products(shape: Shape) -> bool:
    """Return whether the logit gradients may be rounded."""
    return shape.group_size > 1


def rounded(gradient: Tensor, shape: Shape) -> Tensor:
    """Return by how much rounding to bfloat16 may move a logit gradient, float64 [label, batch]."""
    return 2.0**-8 * gradient.abs() + oracles.TINY if by_products(shape) else torch.zeros_like(gradient)


@pytest.mark.parametrize("shape", SHAPES_OF_BFLOAT16, ids=str)
def test_logits_are_within_the_budget_of_float32(backend: str, shape: Shape) -> None:
    problem = problem_of(shape)
    features, *layer = problem.layer
    found = sparse_linear(features.bfloat16(), *layer)
    exact = oracles.logits(
        features.double(),
        problem.weight.double(),
        problem.indices,
        problem.bias.double(),
        problem.group_size,
    )
    assert found.dtype == torch.float32
    oracles.assert_within(found, exact, oracles.logits_bound(problem), "logits")


@pytest.mark.parametrize("shape", SHAPES_OF_BFLOAT16, ids=str)
def test_the_best_labels_are_those_of_the_logits(backend: str, shape: Shape) -> None:
    features, *layer = problem_of(shape).layer
    k = min(5, shape.label)
    logits = sparse_linear(features.bfloat16(), *layer)
    for found, expected in zip(
        top_labels(features.bfloat16(), *layer[:3], k=k, group_size=shape.group_size),
        oracles.top(logits, k),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES_OF_BFLOAT16, ids=str)
def test_unfused_gradients_are_within_the_budget_of_rounded_logit_gradients(
    backend: str, shape: Shape
) -> None:
    problem = problem_of(shape)
    features = problem.features.bfloat16().requires_grad_()
    weight, bias = (value.clone().requires_grad_() for value in (problem.weight, problem.bias))
    incoming = torch.randn(shape.label, shape.batch, generator=torch.Generator().manual_seed(7))
    sparse_linear(features, weight, problem.indices, bias, shape.group_size).backward(incoming)
    exact = incoming.double()
    bounds = oracles.contraction_bounds(problem, exact, rounded(exact, shape))
    leaves = [value.double().requires_grad_() for value in (problem.features, problem.weight, problem.bias)]
    oracles.logits(leaves[0], leaves[1], problem.indices, leaves[2], shape.group_size).backward(exact)
    for name, found, leaf, bound in zip(
        ("features", "weight", "bias"), (features, weight, bias), leaves, bounds, strict=True
    ):
        if name != "bias":  # rounded to the type of what it is the gradient of
            bound = bound + 2.0**-8 * (leaf.grad.abs() + bound)
        oracles.assert_within(found.grad, leaf.grad, bound, name)


@pytest.mark.parametrize("loss", ["squared_hinge", "bce", "softmax", "decoupled_softmax"])
@pytest.mark.parametrize("shape", SHAPES_OF_BFLOAT16[::2], ids=str)
def test_a_step_is_within_the_budget_of_rounded_logit_gradients(
    backend: str, shape: Shape, loss: str
) -> None:
    problem = problem_of(shape)
    of_loss = {"loss": loss, "scale": 0.25, "positive_weight": None, "share_positives": True}
    own = problem.copy()
    zeros = OptimizerState.zeros("momentum", *own.weight.shape)
    value, gradient = fused_step(
        own.features.bfloat16(),
        *own.of_step[1:],
        **of_loss,
        optimizer=OptimizerConfig(kind="momentum"),  # whose velocity is then the gradient
        learning_rate=0.05,
        step=1,
        group_size=shape.group_size,
        state=zeros,
    )
    truth = oracles.gradients(problem, **of_loss, dtype=torch.float64)
    bound = oracles.gradient_bounds(problem, **of_loss)
    exact = logit_gradient(problem, **of_loss)
    features, weight, _ = oracles.contraction_bounds(problem, exact, rounded(exact, shape))
    assert gradient.dtype == torch.float32
    oracles.assert_within(value, truth.loss, bound.loss, "loss")
    oracles.assert_within(gradient, truth.features, bound.features + features, "feature gradient")
    oracles.assert_within(zeros.weight_first, truth.weight, bound.weight + weight, "weight gradient")
    oracles.assert_within(zeros.bias_first, truth.bias, bound.bias, "bias gradient")


def logit_gradient(problem: Problem, **of_loss: object) -> Tensor:
    """Return the exact gradient of the logits, float64 [label, batch]."""
    logits = oracles.logits(
        problem.features.double(),
        problem.weight.double(),
        problem.indices,
        problem.bias.double(),
        problem.group_size,
    ).requires_grad_()
    of_loss = dict(of_loss)
    loss, scale = of_loss.pop("loss"), of_loss.pop("scale")
    (scale * oracles.total_loss(loss, logits, oracles.targets(problem), **of_loss)).backward()
    assert logits.grad is not None
    return logits.grad


def test_values_by_hand(backend: str) -> None:
    """Small whole numbers are exact in every type, in whatever order they are added."""
    generator = np.random.default_rng(5)

    def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(generator.integers(-4, 5, shape).astype(np.float32)).to(dtype)

    label, fan_in, input, batch = 40, 21, 50, 70
    features, weight, bias = whole(input, batch), whole(label, fan_in, dtype=BFLOAT16), whole(label)
    indices = oracles.random_indices(generator, 3, fan_in, input, torch.int32)
    incoming = whole(label, batch)
    dense = oracles.dense(weight.float(), indices, 16, input)
    narrow = features.bfloat16().requires_grad_()
    weight.requires_grad_()
    logits = sparse_linear(narrow, weight, indices, bias, 16)
    assert torch.equal(logits, dense @ features + bias[:, None])
    for dtype in (torch.float32, BFLOAT16):
        gradient = torch.ops.xmlc.sparse_linear_feature_gradient(
            incoming.to(dtype), weight.detach(), indices, 16, input
        )
        assert torch.equal(gradient, dense.T @ incoming)
        gradient = torch.ops.xmlc.sparse_linear_weight_gradient(
            incoming.to(dtype), narrow.detach(), indices, 16
        )
        columns = indices.long()[torch.arange(label) // 16]
        assert torch.equal(gradient, (incoming @ features.T).gather(1, columns))


def test_logit_offsets_are_added_and_get_their_gradients(backend: str) -> None:
    problem = problem_of(Shape(40, 16, 64, 40, 16, BFLOAT16, torch.int32))
    offsets = LogitOffsets.of(
        torch.tensor([0, 0, 17, 39], dtype=torch.int32),
        torch.tensor([3, 39, 33, 0], dtype=torch.int32),
        torch.tensor([1.0, -2.0, 0.5, 4.0]),
    )
    features, *layer = problem.layer
    plain = sparse_linear(features.bfloat16(), *layer)
    places = (offsets.label.long(), offsets.instance.long())
    scores, labels = top_labels(features.bfloat16(), *layer[:3], k=40, group_size=16, offsets=offsets)
    found = torch.empty(40, 40).scatter_(1, labels, scores).T
    assert torch.equal(found, plain.index_put(places, offsets.value, accumulate=True))
    steps = []
    for given in (features.bfloat16(), features):
        own = problem.copy()
        fused_step(
            given,
            *own.of_step[1:],
            loss="bce",
            optimizer=OptimizerConfig(kind="sgd"),
            learning_rate=0.1,
            state=OptimizerState(),
            step=1,
            group_size=16,
            offsets=offsets,
        )
        steps.append(offsets.gradient.clone())
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-5, atol=1e-6)  # not rounded


def test_a_view_that_begins_in_the_middle_of_a_run_is_read_right(backend: str) -> None:
    problem = problem_of(Shape(33, 16, 64, 64, 16, BFLOAT16, torch.uint16))
    features, weight, *rest = problem.layer
    shifted = torch.zeros(features.numel() + 1, dtype=BFLOAT16)[1:].view_as(features).copy_(features)
    odd = torch.zeros(weight.numel() + 1, dtype=BFLOAT16)[1:].view_as(weight).copy_(weight)
    assert torch.equal(sparse_linear(shifted, odd, *rest), sparse_linear(features.bfloat16(), weight, *rest))


def test_other_weights_and_single_labels_take_bfloat16_features_as_their_values(backend: str) -> None:
    for shape in (
        Shape(33, 16, 64, 64, 16, torch.float32, torch.uint16),
        Shape(33, 16, 64, 64, 1, BFLOAT16, torch.uint16),
    ):
        features, *layer = problem_of(shape).layer
        assert torch.equal(sparse_linear(features.bfloat16(), *layer), sparse_linear(features, *layer))


@pytest.mark.parametrize("group_size", [1, 16])
def test_the_ops_pass_torchs_own_checks(backend: str, group_size: int) -> None:
    problem = problem_of(Shape(17, 6, 30, 9, group_size, BFLOAT16, torch.int32))
    features, weight, indices, bias, _ = problem.layer
    arguments = (features.bfloat16(), weight, indices, bias)
    torch.library.opcheck(torch.ops.xmlc.sparse_linear, (*arguments, group_size))
    torch.library.opcheck(torch.ops.xmlc.top_labels, (*arguments, 3, group_size))
