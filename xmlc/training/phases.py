"""Where the time of a run goes: seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

Phase = Literal[
    "data",  # cutting the next batch from the data set
    "forward",  # encoder and penultimate layer
    "output_step",  # logits, loss, gradients and update of the output layer
    "backward",  # backward pass through penultimate layer and encoder
    "dense_update",  # update of both, with the penultimate layer's weight gradient block by block
    "redistribution",
    "validation",
    "checkpoint",
]
PHASES: tuple[Phase, ...] = get_args(Phase)

Item = TypeVar("Item")


class Stopwatch:
    """Adds up the wall time of each phase; phases do not nest, so their sum is at most the time passed."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self.current: Phase | None = None
        """The phase that runs, or that an exception has left."""

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the body to a phase, also where it ends in an exception."""
        started = time.perf_counter()
        self.current = name
        try:
            yield
            self.current = None
        finally:
            self.seconds[name] += time.perf_counter() - started

    def each(self, name: Phase, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items through and count the wait for each to a phase."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase, to the microsecond, and count from zero again."""
        taken: dict[str, float] = {name: round(seconds, 6) for name, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return taken

    def restore(self, seconds: Mapping[str, float]) -> None:
        """Go on from the seconds that an interrupted run had counted."""
        self.seconds = {name: float(seconds.get(name, 0.0)) for name in PHASES}
