"""Measures the memory of real training steps by phase, beside what was planned."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import torch

from xmlc import native
from xmlc.config import Config, EncoderConfig
from xmlc.data import Dataset
from xmlc.evaluation.evaluator import BATCH as EVALUATION_BATCH
from xmlc.memory.budget import MARGIN_BYTES, MARGIN_SHARE
from xmlc.memory.generated import generated_dataset
from xmlc.memory.plan import PHASES, Phase, Plan, plan
from xmlc.memory.process import (
    LARGE_BYTES,
    LARGE_BYTES_OF_ENCODER,
    PeakWatch,
    require_linux,
    return_free_blocks,
    return_large_blocks,
    usage,
)
from xmlc.memory.tracked import NOTHING, Course, now, tracked
from xmlc.training import phases
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.run_folder import RunFolder
from xmlc.training.trainer import Trainer

ROUNDS = 2
"""Of steps, redistribution, validation and checkpoint: what the first leaves is there in the second."""
STEPS = 2  # of a round


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the peak of one phase, beyond what the process held before the run."""

    phase: Phase
    planned: int
    tracked: int
    """By torch's allocator: tensors and workspaces, no NumPy array."""
    process: int
    """Anonymous resident memory."""

    @property
    def residual(self) -> int:
        """What the process took more than planned."""
        return self.process - self.planned

    @property
    def within(self) -> bool:
        """Whether plan and process agree within 5 % and 8 MiB."""
        return abs(self.residual) <= MARGIN_SHARE * self.planned + MARGIN_BYTES


@dataclass(frozen=True)
class Span:
    """One pass through a phase, in the order of the run; bytes at its peak, as of `PhaseMemory`."""

    phase: Phase
    start_seconds: float
    """Since the run began."""
    seconds: float
    tracked: int
    process: int


@dataclass(frozen=True)
class Measured:
    """A measured run."""

    plan: Plan
    phases: tuple[PhaseMemory, ...]
    before_bytes: int
    """Anonymous memory of the process before the run: Python, torch, this package."""
    timeline: tuple[Span, ...]


class MemoryWatch(phases.Stopwatch):
    """A stopwatch that notes the peak of anonymous memory in each phase as well."""

    def __init__(self, watch: PeakWatch) -> None:
        super().__init__()
        self.watch = watch
        self.peaks: dict[str, int] = {}
        self.spans: list[tuple[str, int, int, int]] = []
        """Phase, start and end in nanoseconds, and the peak, in order."""

    @contextmanager
    def phase(self, name: phases.Phase) -> Iterator[None]:
        """See `Stopwatch.phase`."""
        with super().phase(name), self.span(name):
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the peak of the body as the phase's, if it is the highest so far."""
        self.watch.take()
        started = now()
        try:
            yield
        finally:
            ended, peak = now(), self.watch.take()
            self.spans.append((name, started, ended, peak))
            self.peaks[name] = max(self.peaks.get(name, 0), peak)


def batches_to_measure(config: Config) -> tuple[int, int]:
    """Return how many instances to train on, and to validate on, `measure` makes use of."""
    return (ROUNDS * STEPS + 1) * config.training.batch_size, EVALUATION_BATCH


def measure(dataset: Dataset, config: Config, encoder: Path | None = None) -> Measured:
    """Train a few steps of a data set, redistribute, validate, write a checkpoint, twice; nothing is kept.

    ``encoder`` is the folder of the transformer, where the config asks for one.

    A tiny run goes before, so that libraries that load themselves at first use are not taken for the run's.
    """
    eager = {"first_step": 1, "interval_steps": STEPS, "end": 1.0, "decay": "constant"}
    config = config.model_copy(update={"redistribution": config.redistribution.model_copy(update=eager)})
    words = 3 if dataset.kind != "dense" else None
    small = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"width": 64, "fan_in": 2, "hidden": 8, "direct_fan_in": 0}
            ),
            "encoder": EncoderConfig(),
        }
    )
    require_linux()
    return_large_blocks(LARGE_BYTES_OF_ENCODER if config.encoder.trained else LARGE_BYTES)
    gc.collect()
    return_free_blocks()  # of what has planned; but not what the small run leaves, which the profiler reuses
    threads = config.training.threads or torch.get_num_threads()
    torch.set_num_threads(1 if config.training.deterministic else threads)
    with native.kernel_threads(threads):
        _run(generated_dataset(64, 16, words, 600), small)
        if not config.encoder.trained:
            return _run(dataset, config, encoder)
        # To record every operation of a transformer takes memory: the process is measured without.
        return _with_tracked(_run(dataset, config, encoder, recorded=False), _run(dataset, config, encoder))


def _with_tracked(process: Measured, recorded: Measured) -> Measured:
    """Return what was measured of the process, with what another run of the same recorded of torch."""
    pairs = zip(process.phases, recorded.phases, strict=True)
    spans = zip(process.timeline, recorded.timeline, strict=True)
    return replace(
        process,
        phases=tuple(replace(phase, tracked=other.tracked) for phase, other in pairs),
        timeline=tuple(replace(span, tracked=other.tracked) for span, other in spans),
    )


def _run(dataset: Dataset, config: Config, encoder: Path | None = None, recorded: bool = True) -> Measured:
    gc.collect()
    with (
        tracked() if recorded else nullcontext(lambda: NOTHING) as course,
        PeakWatch() as watch,
        tempfile.TemporaryDirectory(prefix="xmlc-profile-") as folder,
    ):
        before = usage().anonymous
        memory = MemoryWatch(watch)
        with memory.span("load"):
            prepared = prepare(dataset, config, encoder=encoder)
            trainer = Trainer(dataset, config, RunFolder(Path(folder)), prepared)
        return_free_blocks()  # as `train_into` does
        trainer.stopwatch = memory
        batches = chain.from_iterable(map(prepared.train.epoch, count()))  # small sets have few batches
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                trainer.step(next(batches))
            with memory.phase("validation"):
                trainer.validate()
            trainer.save()
        del trainer, batches
    planned = plan(config, prepared.problem, batches_of(prepared, traced=True))
    timeline = _timeline(course(), memory, before)
    peaks = {phase: max((s.tracked for s in timeline if s.phase == phase), default=0) for phase in PHASES}
    return Measured(
        planned,
        tuple(
            PhaseMemory(phase, planned.bytes(phase), peaks[phase], memory.peaks[phase] - before)
            for phase in PHASES
            if phase in memory.peaks
        ),
        before,
        timeline,
    )


def _timeline(course: Course, memory: MemoryWatch, before_bytes: int) -> tuple[Span, ...]:
    """Return the peaks of every span, by torch's allocator and of the process."""
    origin = memory.spans[0][1]
    return tuple(
        Span(
            name,
            (start - origin) / 1e9,
            (end - start) / 1e9,
            course.peak(start, end),
            peak - before_bytes,
        )
        for name, start, end, peak in memory.spans
        if name in PHASES  # "data" reads mapped files
    )
