"""What this process holds in memory, as Linux counts it, and a hard limit on it.

Anonymous memory is what only this process has and nothing on disk can replace: the memory of a model. Pages
of memory-mapped files (the data set) come and go with the room there is, and are not counted.
"""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from xmlc.errors import ConfigError

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # to clear_refs: VmHWM starts again from the present size
SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class Usage:
    """Bytes of this process."""

    anonymous: int
    """Resident and private: heap, tensors, workspaces."""
    file: int
    """Resident pages of files: libraries and mapped data."""
    peak_resident: int
    """The most that both were together since `PeakWatch.take`, or since the start."""
    data: int
    """Address space that counts against ``RLIMIT_DATA``, touched or not."""


def usage() -> Usage:
    """Read what the process holds now; zeros where the system has no /proc as Linux has it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return Usage(0, 0, 0, 0)
    found = dict(line.split(":", 1) for line in lines)
    anonymous, file, peak, data = (
        int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM", "VmData")
    )
    return Usage(anonymous, file, peak, data)


def require_linux() -> None:
    """Require what measuring and limits rest on.

    Raises:
        ConfigError: The system has no /proc as Linux has it.
    """
    if not _STATUS.exists():
        raise ConfigError(
            f"memory: measuring and limits need Linux's {_STATUS}, found none; plan without them"
        )


class PeakWatch:
    """Follows the anonymous memory of this process; use it as a context.

    A thread samples it every two milliseconds. The kernel's own record of the resident peak, less the most
    that files had of it, catches what falls between two samples. A file that is mapped and unmapped between
    two of them counts as anonymous: the figure may be too high, never too low by more than what files change.
    Who unmaps may call `sample` before.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()  # or what was read before a call of `take` is noted behind it
        self._thread = threading.Thread(target=self._sample_on, name="peak-watch", daemon=True)
        self._reset()

    def __enter__(self) -> PeakWatch:
        self._reset()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> int:
        """Return the peak of anonymous bytes since the last call, and watch from the present on."""
        with self._lock:
            self._note(now := usage())
            peak = max(self._anonymous, now.peak_resident - self._file)
            self._reset()
        return peak

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        now = usage()
        self._anonymous, self._file = now.anonymous, now.file

    def _note(self, now: Usage) -> None:
        self._anonymous = max(self._anonymous, now.anonymous)
        self._file = max(self._file, now.file)

    def sample(self) -> None:
        """Look at what the process holds, from any thread."""
        with self._lock:
            self._note(usage())

    def _sample_on(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()


@contextmanager
def hard_limit(budget_bytes: int) -> Iterator[None]:
    """Let the process take at most so many bytes beyond what it has now; the next allocation then fails.

    Sets ``RLIMIT_DATA``, which counts private writable address space, so memory-mapped data is free.
    torch's threads are started first: their stacks count, and one that is refused would end the process.
    Stacks of as many threads again, those of the native kernels, may come on top: they are hardly touched.

    Raises:
        ConfigError: The system allows less already, or is not Linux.
    """
    require_linux()
    torch.ones(1 << 20).sum()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stacks = (torch.get_num_threads() + 1) * (min(stack, _LARGEST_STACK) if stack > 0 else _LARGEST_STACK)
    limit = usage().data + budget_bytes + stacks
    if before[1] != resource.RLIM_INFINITY and limit > before[1]:
        raise ConfigError(
            f"memory: the limit must be at most the system's RLIMIT_DATA of {before[1]:,} bytes, "
            f"found {limit:,}; lower the budget or raise that (ulimit -d)"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def device_limit(budget_bytes: int) -> Iterator[None]:
    """Let torch's allocator take at most so many bytes of the CUDA device; the next allocation then fails.

    It counts what the allocator has from the driver, also where no tensor is in it; not the CUDA context.

    Raises:
        ConfigError: The device has less.
    """
    total = device_bytes()
    if budget_bytes > total:
        raise ConfigError(
            f"memory: a budget that is enforced must be at most the device's memory of {total:,} bytes, "
            f"found {budget_bytes:,}; lower it"
        )
    torch.cuda.set_per_process_memory_fraction(budget_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def device_bytes() -> int:
    """Return the memory of the CUDA device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


_LARGEST_STACK = 8 << 20  # what Linux gives a thread unless told otherwise
LARGE_BYTES = 1 << 20
LARGE_BYTES_OF_ENCODER = 1 << 17
"""Where a transformer is trained: many of its weights have less than 1 MiB, and so have their gradients."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_TRIM_BYTES = 128 << 10  # that the heap may keep free at its end: glibc's own default


def return_large_blocks(trained_encoder: bool = False) -> None:
    """Let large blocks go back to the system when they are freed, for the rest of the process.

    glibc would learn from the first of them to keep blocks of up to 32 MiB, in a heap between whose gaps the
    batch's tensors then find no place: a third more memory than is ever in use. To get fresh pages in every
    step costs time, so this is for runs of which memory is the matter. Elsewhere nothing changes.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES_OF_ENCODER if trained_encoder else LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)  # which it has raised with the other


def mapped_files() -> list[tuple[int, int]]:
    """Return begin and end of the addresses at which files are mapped; none where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in lines)
    return [
        (int(begin, 16), int(end, 16))
        for begin, end in (found[0].split("-") for found in fields if len(found) > 5 and found[5][0] == "/")
    ]


def return_free_blocks() -> None:
    """Let what the heap holds free go back to the system, so that none of it is taken for what comes next."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
