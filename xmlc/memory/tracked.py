"""What torch's allocator gives and takes, call by call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, eq=False)
class Course:
    """Bytes held, beyond those at the start, after each call of the allocator."""

    times: NDArray[np.int64]
    """Nanoseconds, rising. [call]"""
    held: NDArray[np.int64]
    """[call + 1]: the first is 0."""

    def peak(self, start: int, end: int) -> int:
        """Return the most that was held between two times, in nanoseconds."""
        first, last = np.searchsorted(self.times, [start, end])
        return int(self.held[first : last + 1].max())


NOTHING = Course(np.empty(0, np.int64), np.zeros(1, np.int64))
"""Of what was not recorded."""


@contextmanager
def tracked() -> Iterator[Callable[[], Course]]:
    """Record the allocator in the body; what is given returns the course, once the body is over."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of itself on stderr otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: _course(profiler)


def _course(profiler: profile) -> Course:
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == _MEMORY_EVENT]
    events.sort(key=lambda event: event.start_ns())
    return Course(
        np.array([event.start_ns() for event in events], np.int64),
        np.cumsum([0, *(event.nbytes() for event in events)]),
    )


now = time.time_ns
"""The clock of the courses."""
