"""Says what could not be allocated, where, and which settings would fit, when memory runs out."""

from __future__ import annotations

import re
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xmlc.config import Config
from xmlc.errors import OutOfMemoryError
from xmlc.memory.budget import BudgetError, fit, limited_plan, parse_bytes
from xmlc.memory.process import device_bytes, usage
from xmlc.memory.tables import mebibytes
from xmlc.memory.terms import Batches, Phase
from xmlc.nn.model import Problem

_TORCH_CUDA = re.compile(r"Tried to allocate ([0-9.]+ [KMG]?i?B)")
_TORCH_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_NAMED = 0.02  # a planned tensor this close in size is the one that was asked for


@dataclass(frozen=True)
class Facts:
    """What the message needs of a run."""

    config: Config
    problem: Problem
    batches: Batches
    start_bytes: int
    """Of `Usage.data` before anything was loaded."""
    device_bytes: int | None = None
    """Of a CUDA device, where the run is held to so many."""


@contextmanager
def explained(run: Facts, phase: Callable[[], str], kept: Callable[[], str]) -> Iterator[None]:
    """Turn an allocation that fails into an error that a user can act on.

    Args:
        run: See there.
        phase: Where the run is.
        kept: What of it is safe on disk.

    Raises:
        OutOfMemoryError: An allocation of torch, NumPy or the native code failed in the body.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what they hold is needed to go on from here
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        try:
            message = _message(run, phase(), str(error), limit)
            raise OutOfMemoryError(f"{message}; {kept()}") from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory has run out; torch has no type of its own for it on a CPU."""
    text = str(error)
    return isinstance(error, MemoryError) or bool(_TORCH_CPU.search(text)) or "out of memory" in text


def _message(run: Facts, phase: str, text: str, limit: int) -> str:
    found = _TORCH_CPU.search(text)
    if found is None and "CUDA" in text:
        return _of_device(run, phase, text)
    if found is not None:
        name = _name(run, phase, int(found[1])) if run.config.training.device == "cpu" else ""
        asked = f"{int(found[1]):,} bytes{name}"
    else:
        asked = text or "a block of native code"
    allowed = (usage().data if limit == resource.RLIM_INFINITY else limit) - run.start_bytes
    advice = "the model is made in the process's memory before it goes to the device: close other programs"
    if run.config.training.device == "cpu":
        advice = _advice(run, allowed, limited=limit != resource.RLIM_INFINITY)
    return (
        f"training: memory must suffice for {asked} in phase {phase}, found none beyond the "
        f"{mebibytes(allowed)} that this run could have; {advice}"
    )


def _of_device(run: Facts, phase: str, text: str) -> str:
    allowed = run.device_bytes or device_bytes()
    asked = _TORCH_CUDA.search(text)
    name = "" if asked is None else _name(run, phase, parse_bytes(asked[1]))  # rounded to two digits
    return (
        f"training: the device's memory must suffice in phase {phase}, found: {text.splitlines()[0]}{name}; "
        f"this run could have {mebibytes(allowed)}; {_advice(run, allowed, limited=False)}"
    )


def _name(run: Facts, phase: str, asked: int) -> str:
    """Return the planned tensor of this size, in brackets."""
    if _unplanned(run):
        return ""
    planned = limited_plan(run.config, run.problem, run.batches)
    places: list[Phase] = [name for name in planned.added if name == phase] or list(planned.added)
    terms = [term for place in places for term in planned.terms(place)]
    near = [term for term in terms if abs(term.bytes - asked) <= _NAMED * asked]
    return f" ({min(near, key=lambda term: abs(term.bytes - asked)).name})" if near else ""


def _unplanned(run: Facts) -> bool:
    """Return whether two towers run without a budget, so that nobody asked their data what a plan needs."""
    return run.config.model.output == "two_tower" and run.batches.towers is None


def _advice(run: Facts, allowed: int, limited: bool) -> str:
    if _unplanned(run):
        return "lower two_tower.mini_batch_size (0 keeps all activations) or training.batch_size"
    if run.config.encoder.trained and run.batches.encoder is None:  # the plan does not know it
        return "lower training.batch_size or encoder.max_length, or set encoder.recompute_activations = true"
    try:
        fitting = fit(run.config, run.problem, run.batches, allowed)
    except BudgetError as error:
        return str(error).removeprefix("memory: ")
    if not fitting.changes and limited:
        now = usage()
        return (
            "the plan says that it would fit, but a hard limit counts address space, of which this process "
            f"has {mebibytes(now.data - now.anonymous)} untouched (stacks, buffers of libraries): raise the "
            "budget by as much at most, or do not enforce it"
        )
    if not fitting.changes and run.config.training.device == "cuda":
        return (
            "the plan says that it would fit: close other programs on the device, or see "
            "xmlc profile --measure --snapshot"
        )
    if not fitting.changes:
        return "the plan says that it would fit: close other programs, or see xmlc profile --measure"
    options = " ".join(f"--set {change.key}={change.now}" for change in fitting.changes)
    return f"these settings would fit, in a new run: {options}"
