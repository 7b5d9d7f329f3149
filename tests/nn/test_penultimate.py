"""The penultimate layer against autograd in float64."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from torch import Tensor

from xmlc.nn.penultimate import PenultimateLayer

HIDDEN, WIDTH, BATCH = 7, 19, 6


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@pytest.fixture
def layer(generator: torch.Generator) -> PenultimateLayer:
    made = PenultimateLayer(HIDDEN, WIDTH, "he", generator)
    made.linear.bias.normal_(generator=generator)
    return made


def truth(
    layer: PenultimateLayer, hidden: Tensor, feature_gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the features and, for this gradient of theirs, the gradients of all inputs, by autograd."""
    leaves = {
        "hidden": hidden.double().requires_grad_(),
        "weight": layer.linear.weight.double().requires_grad_(),
        "bias": layer.linear.bias.double().requires_grad_(),
    }
    features = (leaves["weight"] @ leaves["hidden"].T + leaves["bias"][:, None]).relu()
    gradients = torch.autograd.grad(features, list(leaves.values()), feature_gradient.double())
    return features.detach(), dict(zip(leaves, gradients, strict=True))


class Recorder:
    """Takes the place of an optimizer and keeps the gradients."""

    def __init__(self, layer: PenultimateLayer) -> None:
        self.blocks = layer.linear.blocks
        self.weight = torch.zeros_like(layer.linear.weight)
        self.bias = torch.zeros_like(layer.linear.bias)

    def step(self) -> None:
        for block in self.blocks:
            if block.weight.grad is not None and block.bias.grad is not None:
                self.weight[block.rows] = block.weight.grad
                self.bias[block.rows] = block.bias.grad


def test_features_and_all_gradients_equal_autograd(
    layer: PenultimateLayer, generator: torch.Generator
) -> None:
    hidden = torch.empty(BATCH, HIDDEN).normal_(generator=generator)
    feature_gradient = torch.empty(WIDTH, BATCH).normal_(generator=generator)
    exact, gradients = truth(layer, hidden, feature_gradient)

    features = layer(hidden)
    recorder = Recorder(layer)
    gradient = layer.preactivation_gradient_(features, feature_gradient.clone())
    layer.update(hidden, gradient, recorder)

    weight, bias = layer.linear.weight.double().abs(), layer.linear.bias.double().abs()
    magnitude = weight @ hidden.double().abs().T + bias[:, None]
    oracles.assert_within(features, exact, oracles.gamma(HIDDEN + 1) * magnitude, "features")
    passed = feature_gradient.double().abs()
    oracles.assert_within(
        layer.hidden_gradient(gradient),
        gradients["hidden"],
        oracles.gamma(WIDTH) * (weight.T @ passed).T,
        "hidden",
    )
    oracles.assert_within(
        recorder.weight,
        gradients["weight"],
        oracles.gamma(BATCH) * (passed @ hidden.double().abs()),
        "weight",
    )
    oracles.assert_within(recorder.bias, gradients["bias"], oracles.gamma(BATCH) * passed.sum(1), "bias")


def test_no_gradient_passes_where_a_feature_is_zero() -> None:
    features = torch.tensor([[0.0, 2.0]])
    gradient = PenultimateLayer.preactivation_gradient_(features, torch.tensor([[5.0, 5.0]]))
    assert gradient.tolist() == [[0.0, 5.0]]


def test_he_keeps_the_second_moment_of_unit_variance(generator: torch.Generator) -> None:
    layer = PenultimateLayer(400, 300, "he", generator)
    assert float(layer.linear.weight.std()) == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    features = layer(torch.empty(50, 400).normal_(generator=generator))
    assert float(features.square().mean()) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(layer.linear.bias, torch.zeros(300))


def test_glorot_is_uniform_in_its_bound(generator: torch.Generator) -> None:
    weight = PenultimateLayer(400, 200, "glorot", generator).linear.weight
    bound = math.sqrt(6 / 600)
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
