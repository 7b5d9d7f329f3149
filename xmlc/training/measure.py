"""Measures the memory of real training steps by phase, beside what was planned."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import torch

from xmlc import native
from xmlc.config import Config, EncoderConfig, SimilarityConfig
from xmlc.data import Dataset
from xmlc.files import replacing, writing
from xmlc.memory.budget import MARGIN_BYTES, MARGIN_SHARE
from xmlc.memory.device import CUBLAS, device_plan
from xmlc.memory.generated import generated_dataset, generated_texts
from xmlc.memory.plan import plan
from xmlc.memory.process import (
    PeakWatch,
    require_linux,
    return_free_blocks,
    return_large_blocks,
    usage,
)
from xmlc.memory.terms import PHASES, Phase, Plan
from xmlc.memory.tracked import NOTHING, Course, now, tracked
from xmlc.nn.scratch import before_drop
from xmlc.training import phases
from xmlc.training.prepare import batches_of, embed_block, prepare
from xmlc.training.run_folder import RunFolder
from xmlc.training.tower_sizes import traced_batches
from xmlc.training.trainer import Trainer

ROUNDS = 2
"""Of steps, redistribution, validation and checkpoint: what the first leaves is there in the second."""
STEPS = 2  # of a round
SNAPSHOT_ENTRIES = 100_000
"""Calls of the device's allocator that a snapshot holds, the last ones."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the peak of one phase, beyond what the process held before the run."""

    phase: Phase
    planned: int
    tracked: int
    """By torch's allocator: tensors and workspaces, no NumPy array."""
    process: int
    """Anonymous resident memory."""
    scratch: int
    """Of it, or of the device, the largest workspace of a native op."""
    device_planned: int = 0
    """On the CUDA device, where the run is on one; without what a run before it had left there."""
    device: int = 0
    """By torch's allocator of the device."""

    @property
    def residual(self) -> int:
        """What the process took more than planned."""
        return self.process - self.planned

    @property
    def device_residual(self) -> int:
        """What the device's tensors took more than planned."""
        return self.device - self.device_planned

    @property
    def within(self) -> bool:
        """Whether plan and measurement agree within 5 % and 8 MiB, in the process and on the device."""
        pairs = ((self.residual, self.planned), (self.device_residual, self.device_planned))
        return all(abs(residual) <= MARGIN_SHARE * planned + MARGIN_BYTES for residual, planned in pairs)


@dataclass(frozen=True)
class Span:
    """One pass through a phase, in the order of the run; bytes at its peak, as of `PhaseMemory`."""

    phase: Phase
    start_seconds: float
    """Since the run began."""
    seconds: float
    tracked: int
    process: int
    scratch: int
    device: int


@dataclass(frozen=True)
class Measured:
    """A measured run."""

    plan: Plan
    device_plan: Plan | None
    """Where the run is on a CUDA device."""
    phases: tuple[PhaseMemory, ...]
    before_bytes: int
    """Anonymous memory of the process before the run: Python, torch, this package."""
    timeline: tuple[Span, ...]


@dataclass(frozen=True)
class _Seen:
    """A pass through a phase: start and end in nanoseconds, and peaks in bytes."""

    phase: str
    start: int
    end: int
    process: int
    scratch: int
    device: int


class MemoryWatch(phases.Stopwatch):
    """A stopwatch that notes the peaks of memory in each phase as well."""

    def __init__(self, watch: PeakWatch, device: str) -> None:
        super().__init__()
        self.watch = watch
        self.on_device = device == "cuda"
        self.spans: list[_Seen] = []
        """In order."""

    @contextmanager
    def phase(self, name: phases.Phase) -> Iterator[None]:
        """See `Stopwatch.phase`."""
        with super().phase(name), self.span(name):
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the peaks of the body."""
        self.watch.take()
        native.take_largest_workspace()
        if self.on_device:
            torch.cuda.reset_peak_memory_stats()
        started = now()
        try:
            yield
        finally:
            ended, peak, scratch = now(), self.watch.take(), native.take_largest_workspace()
            device = torch.cuda.max_memory_allocated() if self.on_device else 0
            self.spans.append(_Seen(name, started, ended, peak, scratch, device))


def batches_to_measure(config: Config) -> tuple[int, int]:
    """Return how many instances to train on, and to validate on, `measure` makes use of."""
    return (ROUNDS * STEPS + 1) * config.training.batch_size, config.training.evaluation_batch


def measure(
    dataset: Dataset, config: Config, encoder: Path | None = None, snapshot: Path | None = None
) -> Measured:
    """Train a few steps of a data set, redistribute, validate, write a checkpoint, twice; nothing is kept.

    ``encoder`` is the folder of the transformer, where the config asks for one. Into ``snapshot`` goes what
    torch's allocator of the CUDA device did, for pytorch.org/memory_viz.

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
            # Of label texts, which generated data have not.
            "similarity": SimilarityConfig(),
            "data": config.data.model_copy(update={"label_documents": False}),
        }
    )
    require_linux()
    return_large_blocks(config.encoder.trained)
    gc.collect()
    return_free_blocks()  # of what has planned; but not what the small run leaves, which the profiler reuses
    threads = config.training.threads or torch.get_num_threads()
    torch.set_num_threads(1 if config.training.deterministic else threads)
    with native.kernel_threads(threads):
        if config.model.output == "two_tower":
            return _measure_towers(dataset, config, encoder)
        _run(generated_dataset(64, 16, words, 600), small)
        if config.encoder.kind != "transformer":
            with nullcontext() if snapshot is None else _recorded(snapshot):
                return _run(dataset, config, encoder)
        # To record every operation of a transformer takes memory: the process is measured without.
        measured = _run(dataset, config, encoder, recorded=False)
        with nullcontext() if snapshot is None else _recorded(snapshot):
            return _with_tracked(measured, _run(dataset, config, encoder))


@contextmanager
def _recorded(snapshot: Path) -> Iterator[None]:
    """Record the device's allocator in the body, and write what it did."""
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        yield
        with writing(snapshot), replacing(snapshot) as file:
            torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


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
    on_device = config.training.device == "cuda"
    device_before = torch.cuda.memory_allocated() if on_device else 0
    with (
        tracked() if recorded else nullcontext(lambda: NOTHING) as course,
        PeakWatch() as watch,
        before_drop(watch.sample),
        tempfile.TemporaryDirectory(prefix="xmlc-profile-") as folder,
    ):
        before = usage().anonymous
        memory = MemoryWatch(watch, config.training.device)
        if encoder is not None and not config.encoder.trained:
            with memory.span("encoding"):
                embed_block(dataset, config, encoder)
            return_free_blocks()
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
    sizes = batches_of(prepared, traced=True)
    planned = plan(config, prepared.problem, sizes)
    on_it = device_plan(config, prepared.problem, sizes) if on_device else None
    timeline = _timeline(course(), memory, before, device_before)
    return Measured(planned, on_it, tuple(_by_phase(timeline, planned, on_it)), before, timeline)


def _measure_towers(dataset: Dataset, config: Config, encoder: Path | None) -> Measured:
    """Measure two towers; the tiny run before is one of theirs."""
    small = config.model_copy(
        update={
            "model": config.model.model_copy(update={"hidden": 8}),
            "text": config.text.model_copy(update={"min_document_frequency": 1, "max_features": None}),
            "training": config.training.model_copy(update={"batch_size": 8}),
        }
    )
    with tempfile.TemporaryDirectory(prefix="xmlc-profile-") as cache:
        _run_towers(generated_texts(16, 3, 64), small, encoder, recorded=False, cache=Path(cache))
    gc.collect()
    return_free_blocks()
    # Mini-batches and transformers are many operations, and to record them takes memory: see `measure`.
    # glibc gives a thread a heap of its own: in this one's the encoder that was tried has left large gaps.
    with ThreadPoolExecutor(1) as fresh:
        measured = fresh.submit(_run_towers, dataset, config, encoder, recorded=False).result()
    return _with_tracked(measured, _run_towers(dataset, config, encoder, recorded=True))


def _run_towers(
    dataset: Dataset, config: Config, encoder: Path | None, recorded: bool, cache: Path | None = None
) -> Measured:
    """Run two towers as `_run` does an output layer, and look for negatives in every round."""
    gc.collect()
    with (
        tracked() if recorded else nullcontext(lambda: NOTHING) as course,
        PeakWatch() as watch,
        tempfile.TemporaryDirectory(prefix="xmlc-profile-") as folder,
    ):
        before = usage().anonymous
        memory = MemoryWatch(watch, config.training.device)
        if encoder is not None and not config.encoder.trained:
            with memory.span("encoding"):
                embed_block(dataset, config, encoder)
            return_free_blocks()
        with memory.span("load"):
            prepared = prepare(dataset, config, cache, encoder)
            trainer = Trainer(dataset, config, RunFolder(Path(folder)), prepared)
        return_free_blocks()
        trainer.stopwatch = memory
        for number in range(ROUNDS):
            if trainer.mines:
                with memory.span("mining"):
                    trainer.mine()
            batches = chain.from_iterable(map(trainer.stream.epoch, count(STEPS * number)))
            for _ in range(STEPS):
                trainer.step(next(batches))
            del batches
            with memory.phase("validation"):
                trainer.validate()
            trainer.save()
        mined = trainer.negatives
        del trainer
    planned = plan(config, prepared.problem, traced_batches(dataset, config, prepared, mined))
    timeline = _timeline(course(), memory, before, 0)
    return Measured(planned, None, tuple(_by_phase(timeline, planned, None)), before, timeline)


def _by_phase(timeline: tuple[Span, ...], planned: Plan, on_device: Plan | None) -> Iterator[PhaseMemory]:
    """Yield the highest peaks of each phase beside what was planned."""
    if on_device is not None:  # cuBLAS has had its own since the small run
        on_device = replace(on_device, held=tuple(term for term in on_device.held if term.name != CUBLAS))
    for phase in PHASES:
        passes = [span for span in timeline if span.phase == phase]
        if passes:
            tracked_peak, process, scratch, device = (
                max(getattr(span, name) for span in passes)
                for name in ("tracked", "process", "scratch", "device")
            )
            expected = 0 if on_device is None else on_device.bytes(phase)
            yield PhaseMemory(phase, planned.bytes(phase), tracked_peak, process, scratch, expected, device)


def _timeline(course: Course, memory: MemoryWatch, before_bytes: int, device_before: int) -> tuple[Span, ...]:
    """Return the peaks of every span, beyond what was held before the run."""
    origin = memory.spans[0].start
    return tuple(
        Span(
            seen.phase,
            (seen.start - origin) / 1e9,
            (seen.end - seen.start) / 1e9,
            course.peak(seen.start, seen.end),
            seen.process - before_bytes,
            seen.scratch,
            seen.device - device_before,
        )
        for seen in memory.spans
        if seen.phase in PHASES  # "data" reads mapped files
    )
