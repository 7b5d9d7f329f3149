"""One training step of the whole model against autograd over dense algebra in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracles
import problems
import pytest
import torch
from torch import Tensor

from xmlc.config import Config
from xmlc.data import Batch, CsrRows
from xmlc.nn import Model
from xmlc.nn.output_layer import SparseOutput
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import prepare
from xmlc.training.step import step_generator, training_step

RATE = 0.5
STEP = 7
every_loss = pytest.mark.parametrize("loss", ["squared_hinge", "bce", *oracles.NORMALISED])


def model_and_batch(config: Config, kind: problems.Kind) -> tuple[Model, Batch]:
    prepared = prepare(problems.dataset(kind, train=80), config)
    return Model(config, prepared.problem), next(prepared.train.epoch(0))


def settings(clip_norm: float = 0.0, kind: str = "sgd", **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "training": {"clip_norm": clip_norm},
        "output_optimizer": {"kind": kind, "learning_rate": RATE},
        "dense_optimizer": {"kind": kind, "learning_rate": RATE},
    }
    return problems.config(**(base | sections))


@dataclass(frozen=True)
class Step:
    """Loss, gradient norm of encoder and penultimate layer before clipping, and the parameters afterwards."""

    loss: Tensor
    norm: Tensor
    parameters: dict[str, Tensor]


def autograd_step(model: Model, batch: Batch, dtype: torch.dtype) -> Step:
    """Take one SGD step of copies of all parameters, written from the formulas, in this dtype."""
    config = model.config
    leaves = {
        name: value.to(dtype, copy=True).requires_grad_()
        for name, value in model.tensors().items()
        if name != "output.indices" and "state" not in name
    }
    generator = step_generator(config.training.seed, STEP)
    features = batch.features
    if isinstance(features, CsrRows):
        x = torch.from_numpy(features.to_scipy().toarray()).to(dtype)
        if config.data.unit_length:
            x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-30)
        x = x @ leaves["encoder.embedding"]
    else:
        x = torch.from_numpy(features).to(dtype)
    if config.model.hidden_activation == "relu":
        x = x.relu()
    if config.model.hidden_dropout:
        kept = torch.empty(x.shape).bernoulli_(1.0 - config.model.hidden_dropout, generator=generator)
        x = x * kept.to(dtype) / (1.0 - config.model.hidden_dropout)
    if "penultimate.weight" in leaves:
        x = (x @ leaves["penultimate.weight"].T + leaves["penultimate.bias"]).relu()
    weight = leaves["output.weight"]
    if isinstance(model.output, SparseOutput):
        weight = oracles.dense(weight, model.output.indices, config.model.group_size, x.shape[1])
    logits = weight @ x.T + leaves["output.bias"][:, None]
    goal = torch.from_numpy(2.0 * (batch.labels.to_scipy().toarray().T > 0) - 1.0).to(dtype)
    positive_weight = getattr(model.output, "positive_weight")  # noqa: B009
    mean = config.loss.reduction == "mean"
    loss = oracles.total_loss(config.loss.kind, logits, goal, positive_weight, share_positives=mean)
    loss = loss / len(batch.instances)
    if mean and config.loss.kind not in oracles.NORMALISED:
        loss = loss / model.problem.label_count
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    front = [value for name, value in gradients.items() if not name.startswith("output.")]
    norm = torch.stack([value.square().sum() for value in front]).sum().sqrt() if front else torch.zeros(())
    clip = config.training.clip_norm
    factor = min(1.0, clip / float(norm)) if clip and front else 1.0
    parameters = {
        name: leaf.detach() - RATE * (1.0 if name.startswith("output.") else factor) * gradients[name]
        for name, leaf in leaves.items()
    }
    return Step(loss.detach(), norm.detach(), parameters)


def assert_step_equals_autograd(config: Config, kind: problems.Kind) -> None:
    model, batch = model_and_batch(config, kind)
    exact, plain = (autograd_step(model, batch, dtype) for dtype in (torch.float64, torch.float32))
    if config.training.clip_norm:
        assert float(exact.norm) > 2 * config.training.clip_norm, "the test must clip"
    optimizers = Optimizers(model)
    optimizers.set_rates(RATE, RATE)
    before = {name: value.clone() for name, value in model.tensors().items()}
    loss = training_step(model, batch, optimizers, RATE, STEP, config.training.clip_norm, Stopwatch())
    oracles.assert_no_worse_than_plain(loss, exact.loss, plain.loss.double(), 4 * oracles.UNIT * exact.loss)
    for name, value in model.tensors().items():
        if name in exact.parameters:
            assert not torch.equal(value, before[name]), f"{name} must move"
            true = exact.parameters[name]
            slack = 4 * oracles.UNIT * true
            oracles.assert_no_worse_than_plain(value, true, plain.parameters[name].double(), slack, name)


@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
@every_loss
@problems.every_output
@pytest.mark.parametrize("kind", problems.KINDS)
def test_a_step_is_the_gradient_of_the_whole_model(
    kind: problems.Kind, output: str, width: int, loss: str, clip_norm: float
) -> None:
    if kind == "dense" and (output == "dense" or not width):
        clip_norm = 0.0  # nothing lies before the output layer
    assert_step_equals_autograd(
        settings(clip_norm, model={"output": output, "width": width, "bottleneck": 9}, loss={"kind": loss}),
        kind,
    )


@every_loss
@problems.every_output
def test_a_step_with_everything_on_is_the_gradient_of_the_whole_model(
    output: str, width: int, loss: str
) -> None:
    """Mean reduction, weights of positives, dropout and activation of hidden, shared inputs, clipping."""
    assert_step_equals_autograd(
        settings(
            0.0001,
            model={
                "output": output,
                "width": width,
                "bottleneck": 9,
                "group_size": 16,
                "hidden_dropout": 0.4,
                "hidden_activation": "relu",
            },
            loss={
                "kind": loss,
                "reduction": "mean",
                "positive_weight": 2.0,
                "positive_weight_propensity": True,
            },
            data={"unit_length": False},
        ),
        "sparse",
    )


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_clipping_bounds_the_move_of_encoder_and_penultimate_layer(kind: problems.Kind) -> None:
    config = settings(clip_norm=0.01)
    model, batch = model_and_batch(config, kind)
    before = {name: value.double() for name, value in model.tensors().items()}
    optimizers = Optimizers(model)
    optimizers.set_rates(RATE, RATE)
    training_step(model, batch, optimizers, RATE, STEP, 0.01, Stopwatch())
    moved = sum(
        float((value.double() - before[name]).square().sum())
        for name, value in model.tensors().items()
        if not name.startswith("output.")
    )
    assert math.sqrt(moved) <= RATE * 0.01 * (1 + 1e-4)
    assert math.sqrt(moved) >= RATE * 0.01 * (1 - 1e-2)


def test_a_bound_above_the_norm_changes_nothing() -> None:
    def bits(clip_norm: float) -> list[bytes]:
        model, batch = model_and_batch(settings(clip_norm), "sparse")
        optimizers = Optimizers(model)
        optimizers.set_rates(RATE, RATE)
        training_step(model, batch, optimizers, RATE, STEP, clip_norm, Stopwatch())
        return [oracles.bits(value) for value in model.tensors().values()]

    assert bits(0.0) == bits(1e6)


def test_a_batch_without_features_or_labels_trains_and_stays_finite() -> None:
    config = settings(clip_norm=1.0)
    model, batch = model_and_batch(config, "sparse")
    size = len(batch.instances)
    assert isinstance(batch.features, CsrRows)
    nothing = CsrRows(np.zeros(size + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), 96)
    unlabelled = CsrRows(np.zeros(size + 1, np.int64), np.empty(0, np.int32), None, problems.LABELS)
    optimizers = Optimizers(model)
    optimizers.set_rates(RATE, RATE)
    loss = training_step(
        model, Batch(batch.instances, nothing, unlabelled), optimizers, RATE, 1, 1.0, Stopwatch()
    )
    assert math.isfinite(float(loss))
    assert all(value.double().isfinite().all() for value in model.tensors().values())


def test_only_embeddings_of_the_batch_move() -> None:
    model, batch = model_and_batch(settings(kind="adam"), "sparse")
    before = model.tensors()["encoder.embedding"].clone()
    optimizers = Optimizers(model)
    optimizers.set_rates(RATE, RATE)
    training_step(model, batch, optimizers, RATE, STEP, 0.0, Stopwatch())
    moved = (model.tensors()["encoder.embedding"] != before).any(dim=1).nonzero()[:, 0].tolist()
    assert isinstance(batch.features, CsrRows)
    assert moved == sorted(set(batch.features.indices.tolist()))


def test_no_gradient_is_left_after_a_step() -> None:
    model, batch = model_and_batch(settings(), "sparse")
    training_step(model, batch, Optimizers(model), RATE, STEP, 0.0, Stopwatch())
    assert all(parameter.grad is None for parameter in model.encoder.parameters())


def test_seed_and_step_decide_the_dropout() -> None:
    def draw(seed: int, step: int) -> list[float]:
        return torch.rand(4, generator=step_generator(seed, step)).tolist()

    assert draw(1, 1) == draw(1, 1)
    assert len({tuple(draw(seed, step)) for seed in (0, 1, 2**63 - 1) for step in (1, 2)}) == 6
