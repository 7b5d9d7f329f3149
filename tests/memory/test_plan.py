"""The plan: bytes of tensors that exist, phase by phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import problems
import pytest

from xmlc.memory.generated import generated_dataset
from xmlc.memory.plan import plan
from xmlc.memory.terms import Batches, Plan
from xmlc.nn import Model, Problem
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.profiling import Sizes, profile
from xmlc.training.step import training_step

SETTINGS: list[tuple[problems.Kind, dict[str, dict[str, Any]]]] = [
    ("dense", {}),
    ("sparse", {"model": {"weight_dtype": "bfloat16"}, "output_optimizer": {"kind": "label_adam"}}),
    ("dense", {"model": {"weight_dtype": "float8_e4m3fn"}, "output_optimizer": {"kind": "sgd"}}),
    ("sparse", {"output_optimizer": {"kind": "momentum"}, "dense_optimizer": {"kind": "sgd"}}),
    ("dense", {"output_optimizer": {"kind": "adam", "state_dtype": "bfloat16"}}),
    ("sparse", {"output_optimizer": {"kind": "adam", "state_dtype": "float8_e4m3fn"}}),
    ("sparse", {"model": {"direct_fan_in": 3}}),
    ("dense", {"model": {"group_size": 16}, "dense_optimizer": {"kind": "momentum"}}),
    ("dense", {"model": {"output": "bottleneck"}}),
    ("sparse", {"model": {"output": "dense"}, "output_optimizer": {"kind": "sgd"}}),
]


@pytest.mark.parametrize(("kind", "sections"), SETTINGS)
def test_weights_and_state_are_those_of_the_model(
    kind: problems.Kind, sections: dict[str, dict[str, Any]]
) -> None:
    config = problems.config(**sections)
    prepared = prepare(problems.dataset(kind, train=80), config)
    model = Model(config, prepared.problem)
    optimizers = Optimizers(model)
    batch = next(prepared.train.epoch(0))
    training_step(model, batch, optimizers, 0.01, 1, 0.0, Stopwatch())

    held = plan(config, prepared.problem, batches_of(prepared)).held
    weights = {term.name: term.bytes for term in held if term.category == "weights"}
    state = sum(term.bytes for term in held if term.category == "optimizer")

    tensors = model.tensors()
    for name, size in weights.items():
        assert size == tensors[name].nbytes, name
    steps = sum(tensor.nbytes for name, tensor in optimizers.tensors().items() if name.endswith("step"))
    kept = [*(tensors[name] for name in tensors.keys() - weights.keys()), *optimizers.tensors().values()]
    assert state == sum(tensor.nbytes for tensor in kept) - steps


def amazon(**sections: dict[str, Any]) -> Plan:
    """Amazon-670K's sizes, whose bytes are easily worked out by hand."""
    problem = Problem(True, 768, 670_091, 490_449, 0.6, 2.6, np.empty(0, np.int64))
    return plan(problems.config(**sections), problem, Batches(153_025, 768.0))


def test_a_plan_by_hand() -> None:
    planned = amazon(
        model={"width": 32_768, "fan_in": 32, "weight_dtype": "bfloat16"},
        output_optimizer={"kind": "sgd"},
        dense_optimizer={"kind": "sgd"},
        training={"batch_size": 128, "threads": 1},
    )
    assert {term.name: term.bytes for term in planned.held} == {
        "penultimate.weight": 32_768 * 768 * 4,
        "penultimate.bias": 32_768 * 4,
        "output.indices": 670_091 * 32 * 2,
        "output.weight": 670_091 * 32 * 2,
        "output.bias": 670_091 * 4,
        "label_instances": 670_091 * 8,
        "rows of the instances, and their order": 2 * 490_449 * 8,
        "inverse_propensity": 670_091 * 8,
    }
    added = {term.name: term.bytes for term in planned.added["output_step"]}
    workspace = added.pop("workspace of fused_step")
    assert added == {
        "hidden": 128 * 768 * 4,
        "features": 32_768 * 128 * 4,
        "gradient of the features": 32_768 * 128 * 4,
    }
    assert workspace > 2 * 32_768 * 128 * 4  # features and gradient once more, in tiles
    assert planned.peak_phase == "output_step"
    assert planned.binding.name == "penultimate.weight"
    assert planned.peak_bytes == max(planned.bytes(phase) for phase in planned.added)


def test_a_state_in_float8_by_hand() -> None:
    planned = amazon(model={"fan_in": 32}, output_optimizer={"kind": "adam", "state_dtype": "float8_e4m3fn"})
    prefix = "output.state."
    assert {
        term.name.removeprefix(prefix): term.bytes for term in planned.held if term.name.startswith(prefix)
    } == {
        "weight_first": 670_091 * 32,
        "weight_second": 670_091 * 32,
        "bias_first": 670_091 * 4,
        "bias_second": 670_091 * 4,
        "scale": 670_091,
    }


def test_direct_connections_by_hand() -> None:
    sections: dict[str, Any] = {
        "model": {"direct_fan_in": 8, "width": 64, "hidden": 16},
        "similarity": {"text_weight": 0.5, "neighbour_weight": 0.5},
        "training": {"threads": 2},
    }
    problem = Problem(False, 5_000, 1_000_000, 20_000, 0.6, 2.6, np.empty(0, np.int64))
    planned = plan(problems.config(**sections), problem, Batches(1000, 10.0))

    table = 1_000_000 * 8 * 4
    at_load = {term.name: term.bytes for term in planned.terms("load")}
    assert at_load["direct connections as chosen"] == 2 * table
    assert at_load["output.direct.state"] == 2 * table, "moments are zeros that are written"
    later = {term.name: term.bytes for term in planned.terms("forward")}
    assert "direct connections as chosen" not in later, "they are the layer's by then"
    assert later["output.direct.indices"] == later["output.direct.weight"] == table
    ranking = {term.name: term.bytes for term in planned.terms("validation")}
    assert ranking["products with all texts, at most"] == 2 * 64 * 1_000_000 * 8, "labels, then instances"


def test_what_lies_on_the_disk_is_not_counted() -> None:
    sections = {"model": {"width": 4096, "direct_fan_in": 0}, "output_optimizer": {"kind": "adam"}}
    memory = amazon(**sections)
    disk = amazon(**sections, training={"storage": "disk"})
    assert {term.name for term in disk.mapped} == {
        "output.indices",
        "output.weight",
        *(f"output.state.{name}" for name in ("weight_first", "weight_second", "bias_first", "bias_second")),
    }
    assert memory.mapped == ()
    assert sorted((*disk.held, *disk.mapped), key=str) == sorted(memory.held, key=str)
    size = sum(term.bytes for term in disk.mapped)
    for phase in memory.added:
        assert memory.bytes(phase) - disk.bytes(phase) == size


def test_wide_layers_have_wider_indices() -> None:
    [indices] = [term for term in amazon(model={"width": 65_537}).held if term.name == "output.indices"]
    assert indices.bytes == 670_091 * problems.config().model.fan_in * 4


def test_a_plan_of_a_device_needs_none() -> None:
    found = profile(Sizes(1000, 8, 0, 3, 50), overrides=["training.device=cuda"], budget="1GiB")
    assert found.device_plan is not None and found.limited is found.device_plan
    assert found.fitted is not None and found.fitted.changes == ()


def test_generated_labels_are_distinct_in_range_and_of_falling_frequency() -> None:
    labels = generated_dataset(1000, 8, None, 2000).train.labels
    assert labels.rows == 2000
    rows = [labels.indices[a:b] for a, b in zip(labels.offsets, labels.offsets[1:], strict=False)]
    assert all((np.diff(row) > 0).all() for row in rows)
    assert labels.indices.min() >= 0
    assert labels.indices.max() < 1000
    counts = np.sort(np.bincount(labels.indices, minlength=1000))[::-1]
    assert counts[:10].sum() > 0.2 * counts.sum()
