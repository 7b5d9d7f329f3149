"""Measures the memory of real training steps by phase, beside what was planned."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from xmlc import native
from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.evaluation.evaluator import BATCH as EVALUATION_BATCH
from xmlc.memory.budget import MARGIN_BYTES, MARGIN_SHARE
from xmlc.memory.generated import generated_dataset
from xmlc.memory.plan import PHASES, Phase, Plan, plan
from xmlc.memory.process import PeakWatch, require_linux, return_large_blocks, usage
from xmlc.training import phases
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.run_folder import RunFolder
from xmlc.training.trainer import Trainer

ROUNDS = 2
"""Of steps, redistribution, validation and checkpoint: what the first leaves is there in the second."""
STEPS = 2  # of a round
_MEMORY_EVENT = "[memory]"


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
        started = time.time_ns()
        try:
            yield
        finally:
            ended, peak = time.time_ns(), self.watch.take()
            self.spans.append((name, started, ended, peak))
            self.peaks[name] = max(self.peaks.get(name, 0), peak)


def batches_to_measure(config: Config) -> tuple[int, int]:
    """Return how many instances to train on, and to validate on, `measure` makes use of."""
    return (ROUNDS * STEPS + 1) * config.training.batch_size, EVALUATION_BATCH


def measure(dataset: Dataset, config: Config) -> Measured:
    """Train a few steps of a data set, redistribute, validate, write a checkpoint, twice; nothing is kept.

    A tiny run goes before, so that libraries that load themselves at first use are not taken for the run's.
    """
    eager = {"first_step": 1, "interval_steps": STEPS, "end": 1.0, "decay": "constant"}
    config = config.model_copy(update={"redistribution": config.redistribution.model_copy(update=eager)})
    words = 3 if dataset.kind != "dense" else None
    small = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"width": 64, "fan_in": 2, "hidden": 8, "direct_fan_in": 0}
            )
        }
    )
    require_linux()
    return_large_blocks()
    threads = config.training.threads or torch.get_num_threads()
    torch.set_num_threads(1 if config.training.deterministic else threads)
    with native.kernel_threads(threads):
        _run(generated_dataset(64, 16, words, 600), small)
        return _run(dataset, config)


def _run(dataset: Dataset, config: Config) -> Measured:
    gc.collect()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        PeakWatch() as watch,
        tempfile.TemporaryDirectory(prefix="xmlc-profile-") as folder,
    ):
        before = usage().anonymous
        memory = MemoryWatch(watch)
        with memory.span("load"):
            prepared = prepare(dataset, config)
            trainer = Trainer(dataset, config, RunFolder(Path(folder)), prepared)
        trainer.stopwatch = memory
        batches = chain.from_iterable(map(prepared.train.epoch, count()))  # small sets have few batches
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                trainer.step(next(batches))
            with memory.phase("validation"):
                trainer.validate()
            trainer.save()
        del trainer, batches
    planned = plan(config, prepared.problem, batches_of(prepared))
    timeline = _timeline(profiler, memory, before)
    tracked = {phase: max((s.tracked for s in timeline if s.phase == phase), default=0) for phase in PHASES}
    return Measured(
        planned,
        tuple(
            PhaseMemory(phase, planned.bytes(phase), tracked[phase], memory.peaks[phase] - before)
            for phase in PHASES
            if phase in memory.peaks
        ),
        before,
        timeline,
    )


def _timeline(profiler: profile, memory: MemoryWatch, before_bytes: int) -> tuple[Span, ...]:
    """Add up what torch's allocator gave and took, and return the peaks of every span."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == _MEMORY_EVENT]
    events.sort(key=lambda event: event.start_ns())
    times = np.array([event.start_ns() for event in events], np.int64)
    held = np.cumsum([0, *(event.nbytes() for event in events)])
    origin = memory.spans[0][1]
    found = []
    for name, start, end, peak in memory.spans:
        if name not in PHASES:  # "data" reads mapped files
            continue
        first, last = np.searchsorted(times, [start, end])
        found.append(
            Span(
                name,
                (start - origin) / 1e9,
                (end - start) / 1e9,
                int(held[first : last + 1].max()),
                peak - before_bytes,
            )
        )
    return tuple(found)
