"""The plan of a CUDA device: what tensors take on one that is pretended, phase by phase."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracles
import pretended
import problems
import pytest
import torch

from xmlc.config import Config, load_config
from xmlc.errors import ConfigError, NativeError
from xmlc.memory.budget import MARGIN_BYTES, MARGIN_SHARE, SEGMENT_BYTES, fit, needed_bytes
from xmlc.memory.device import CUBLAS, CUBLAS_BYTES, device_plan
from xmlc.memory.generated import generated_dataset
from xmlc.memory.plan import plan
from xmlc.nn import Model
from xmlc.training.measure import SNAPSHOT_ENTRIES, Measured, measure
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.profiling import Sizes, profile
from xmlc.training.step import training_step

Sections = dict[str, dict[str, Any]]

SETTINGS: list[tuple[problems.Kind, Sections]] = [
    ("dense", {}),
    ("sparse", {"model": {"weight_dtype": "bfloat16"}, "output_optimizer": {"kind": "label_adam"}}),
    ("dense", {"model": {"weight_dtype": "float8_e4m3fn"}, "output_optimizer": {"kind": "sgd"}}),
    ("sparse", {"output_optimizer": {"kind": "momentum"}, "dense_optimizer": {"kind": "sgd"}}),
    ("sparse", {"model": {"direct_fan_in": 3}, "loss": {"positive_weight": 2.0}}),
    ("dense", {"model": {"group_size": 16}, "dense_optimizer": {"kind": "momentum"}}),
    ("dense", {"model": {"output": "bottleneck"}, "loss": {"positive_weight_propensity": True}}),
    ("sparse", {"model": {"output": "dense"}, "output_optimizer": {"kind": "sgd"}}),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with oracles.threads(1):
        yield


@pytest.mark.parametrize(("kind", "sections"), SETTINGS)
def test_what_is_held_on_the_device_is_planned_to_the_byte(kind: problems.Kind, sections: Sections) -> None:
    config = problems.config(**sections, training={"device": "cuda"})
    with pretended.device():
        prepared = prepare(problems.dataset(kind, train=80), config)
        model = Model(config, prepared.problem)
        made = {name: tensor.nbytes for name, tensor in model.tensors().items()}
        before = pretended.allocator.held
        model.move(torch.device("cuda"))
        loaded = pretended.allocator.held - before
        optimizers = Optimizers(model)
        training_step(model, next(prepared.train.epoch(0)), optimizers, 0.01, 1, 0.0, Stopwatch())
        held = pretended.allocator.held - before
        steps = [value for name, value in optimizers.tensors().items() if name.endswith("step")]
        counters = sum(each.nbytes for each in steps if each.device.type == "cuda")
    planned = device_plan(config, prepared.problem, batches_of(prepared))
    assert loaded == planned.bytes("load")
    assert held - counters == sum(term.bytes for term in planned.held if term.name != CUBLAS)
    # Before it moved, the process held the same, and direct connections, which stay.
    on_host = plan(config, prepared.problem, batches_of(prepared))
    weights = {term.name: term.bytes for term in on_host.terms("load") if term.name in made}
    assert weights == {name: size for name, size in made.items() if name in weights}
    assert {name for name in made if ".direct." not in name} <= weights.keys()


SHAPES: list[tuple[int, int | None, list[str]]] = [
    (200_000, None, ["model.width=8192"]),
    (
        150_000,
        60,
        ["model.width=4096", "model.hidden=128", "model.weight_dtype=bfloat16", "model.group_size=16",
         "model.feature_dtype=bfloat16", "output_optimizer.kind=label_adam", "loss.kind=softmax"],
    ),
    (200_000, None, ["model.width=70000", "model.fan_in=8", "model.weight_dtype=float8_e4m3fn",
                     "output_optimizer.kind=sgd", "redistribution.scope=group"]),
    (60_000, None, ["model.output=dense", "training.block_bytes=4194304"]),
]  # fmt: skip


def settings(*overrides: str) -> Config:
    return load_config(
        None, ["training.threads=1", "training.device=cuda", "data.validation_fraction=0.3", *overrides]
    )


def measured(labels: int, words: int | None, overrides: list[str]) -> Measured:
    dataset = generated_dataset(labels, 20_000 if words else 64, words, 900)
    with pretended.device():
        return measure(dataset, settings(*overrides))


@pytest.mark.parametrize(("labels", "words", "overrides"), SHAPES)
def test_the_plan_of_the_device_holds_phase_by_phase(
    labels: int, words: int | None, overrides: list[str]
) -> None:
    found = measured(labels, words, overrides)
    assert found.device_plan is not None
    for phase in found.phases:
        allowed = MARGIN_SHARE * phase.device_planned + MARGIN_BYTES
        assert abs(phase.device_residual) <= allowed, phase
        assert phase.device > phase.scratch or phase.phase == "load", phase
    phases = {phase.phase: phase for phase in found.phases}
    # The CPU's kernels, which stand for the device's, widen features in bfloat16.
    emulated, narrow = "XMLC_EMULATED" in os.environ, "model.feature_dtype=bfloat16" in overrides
    for phase, op in (("output_step", "fused_step"), ("validation", "top_labels")):
        for term in found.device_plan.terms(phase):  # type: ignore[arg-type]
            if term.name == f"workspace of {op}" and (emulated or not narrow):
                # The plan knows the mean number of positives only, which the softmax losses' has room for.
                assert term.bytes == pytest.approx(phases[phase].scratch, rel=0.01)


def test_a_plan_that_leaves_out_what_the_device_holds_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: 64 MiB that nobody planned, in one phase."""
    from xmlc.training.trainer import Trainer

    validate = Trainer.validate

    def greedy(trainer: Trainer) -> Any:
        waste = torch.zeros(16 << 20, device="cuda")
        report = validate(trainer)
        assert waste.numel()
        return report

    monkeypatch.setattr(Trainer, "validate", greedy)
    found = measured(2000, None, ["model.width=512"])
    phases = {phase.phase: phase for phase in found.phases}
    assert phases["validation"].device_residual > MARGIN_BYTES + (48 << 20)
    assert not phases["validation"].within


def test_a_snapshot_records_the_measured_run_and_not_the_small_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def dump(file: str) -> None:
        asked.append(file)
        Path(file).write_bytes(b"a pickle")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    dataset = generated_dataset(500, 16, None, 900)
    with pretended.device():
        measure(dataset, settings("model.width=256"), snapshot=tmp_path / "snapshot.pickle")
    started, _, ended = asked
    assert started == {"max_entries": SNAPSHOT_ENTRIES} and ended == {"enabled": None}
    assert (tmp_path / "snapshot.pickle").read_bytes() == b"a pickle"
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pickle"]


@pytest.mark.parametrize(
    ("device", "options", "found"),
    [
        ("cpu", {"measured": True}, r"found training\.device = cpu"),
        ("cuda", {}, "found no --measure"),
    ],
)
def test_a_snapshot_needs_a_device_and_a_measurement(
    device: str, options: dict[str, bool], found: str, tmp_path: Path
) -> None:
    sizes = Sizes(500, 16, 0, 3, 900)
    with pytest.raises(ConfigError, match=f"--snapshot needs --measure and --device cuda.*{found}"):
        profile(sizes, overrides=[f"training.device={device}"], snapshot=tmp_path / "snapshot", **options)  # type: ignore[arg-type]


def test_a_measurement_on_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(NativeError, match="a CUDA device and CUDA kernels for it must be there"):
        profile(Sizes(500, 16, 0, 3, 900), overrides=["training.device=cuda"], measured=True)


def test_a_budget_is_of_the_device_and_counts_segments_and_cublas() -> None:
    config = settings("model.width=16384")
    prepared = prepare(generated_dataset(50_000, 64, None, 300), settings("training.device=cpu"))
    batches = batches_of(prepared)
    planned = device_plan(config, prepared.problem, batches)
    assert planned.peak_bytes > CUBLAS_BYTES
    needed = needed_bytes(planned)
    assert needed == int(planned.peak_bytes * (1 + MARGIN_SHARE)) + MARGIN_BYTES + SEGMENT_BYTES
    assert fit(config, prepared.problem, batches, needed).changes == ()
    fitting = fit(config, prepared.problem, batches, needed - (8 << 20))
    assert fitting.changes and fitting.plan.place == "device"
    assert needed_bytes(fitting.plan) <= needed - (8 << 20)


def test_the_process_keeps_little_once_the_model_has_moved() -> None:
    prepared = prepare(generated_dataset(50_000, 64, None, 300), settings("training.device=cpu"))
    beside = plan(settings(), prepared.problem, batches_of(prepared))
    assert beside.peak_phase == "load"
    assert {term.category for term in beside.held} == {"statistics"}
