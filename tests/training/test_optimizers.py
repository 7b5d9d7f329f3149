"""torch's optimizers of the dense parts: rates, state for checkpoints, what they refuse."""

from __future__ import annotations

from typing import Any

import oracles
import problems
import pytest
import torch

from xmlc.errors import ConfigError
from xmlc.nn import Model
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import prepare
from xmlc.training.step import training_step


def steps(model: Model, optimizers: Optimizers, first: int, last: int) -> None:
    prepared = prepare(problems.dataset(kind_of(model), train=80), model.config)
    batch = next(prepared.train.epoch(0))
    for step in range(first, last):
        optimizers.set_rates(0.01, 0.02)
        training_step(model, batch, optimizers, 0.02, step, 0.0, Stopwatch())


def kind_of(model: Model) -> problems.Kind:
    return "dense" if model.problem.dense_features else "sparse"


def model(kind: problems.Kind = "sparse", **sections: dict[str, Any]) -> Model:
    config = problems.config(**sections)
    return Model(config, prepare(problems.dataset(kind, train=80), config).problem)


CASES = [
    ("sparse", "sparse", "adam", "adam"),
    ("sparse", "sparse", "sgd", "sgd"),
    ("sparse", "dense", "adam", "momentum"),
    ("dense", "bottleneck", "momentum", "adam"),
    ("dense", "sparse", "momentum", "label_adam"),
]


@pytest.mark.parametrize(("kind", "output", "dense", "out"), CASES)
def test_state_taken_over_goes_on_with_the_same_bits(
    kind: problems.Kind, output: str, dense: str, out: str
) -> None:
    sections = {
        "model": {"output": output, "bottleneck": 9},
        "dense_optimizer": {"kind": dense, "weight_decay": 0.1},
        "output_optimizer": {"kind": out, "weight_decay": 0.1},
    }
    whole = model(kind, **sections)
    steps(whole, Optimizers(whole), 1, 7)

    begun = model(kind, **sections)
    optimizers = Optimizers(begun)
    steps(begun, optimizers, 1, 4)
    resumed = model(kind, **sections)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(begun.tensors()[name])
    fresh = Optimizers(resumed)
    fresh.load({name: value.clone() for name, value in optimizers.tensors().items()})
    steps(resumed, fresh, 4, 7)

    assert fresh.tensors().keys() == optimizers.tensors().keys()
    for name, tensor in whole.tensors().items():
        assert oracles.bits(tensor) == oracles.bits(resumed.tensors()[name]), name


def test_before_the_first_step_there_is_no_state() -> None:
    assert Optimizers(model()).tensors() == {}


def test_plain_sgd_never_has_state() -> None:
    made = model(dense_optimizer={"kind": "sgd"}, output_optimizer={"kind": "sgd"})
    optimizers = Optimizers(made)
    steps(made, optimizers, 1, 3)
    assert optimizers.tensors() == {}


def test_rates_reach_their_parts() -> None:
    made = model(
        "sparse",
        model={"output": "dense"},
        **{"dense_optimizer": {"kind": "sgd"}, "output_optimizer": {"kind": "sgd"}},
    )
    optimizers = Optimizers(made)
    before = {name: value.clone() for name, value in made.tensors().items()}
    batch = next(prepare(problems.dataset("sparse", train=80), made.config).train.epoch(0))
    optimizers.set_rates(0.0, 0.5)
    training_step(made, batch, optimizers, 0.5, 1, 0.0, Stopwatch())
    after = made.tensors()
    assert torch.equal(after["encoder.embedding"], before["encoder.embedding"])
    assert not torch.equal(after["output.weight"], before["output.weight"])


def test_momentum_of_an_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dense_optimizer\.kind must be adam or sgd .* found 'momentum'"):
        Optimizers(model(dense_optimizer={"kind": "momentum"}))
