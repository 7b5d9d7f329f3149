"""What a person sees of a run on stderr: a line for each epoch, and bars where stderr is a terminal."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from xmlc.data.batches import Batch

T = TypeVar("T")


class Bar(tqdm):
    """A progress bar without the thread that watches for slow ones, whose stack would count under a limit."""

    monitor_interval = 0


_silent = False
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def bar(total: int, description: str, initial: int = 0) -> Bar:
    """Return a progress bar over batches."""
    return Bar(
        total=total,
        initial=initial,
        desc=description,
        unit="batch",
        miniters=1,
        file=sys.stderr,
        disable=_silent or not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )


def evaluation_bar(batches: Iterable[Batch], total: int) -> Iterable[Batch]:
    """Pass batches through under a bar."""
    return _under_bar(batches, total, "evaluate")


def embedding_bar(blocks: Iterable[T], total: int) -> Iterable[T]:
    """Pass blocks of texts through under a bar."""
    return _under_bar(blocks, total, "embed texts")


def mining_bar(batches: Iterable[Batch], total: int) -> Iterable[Batch]:
    """Pass batches through under a bar."""
    return _under_bar(batches, total, "mine negatives")


def _under_bar(items: Iterable[T], total: int, description: str) -> Iterable[T]:
    with bar(total, description) as progress:
        for item in items:
            yield item
            progress.update()


def say(message: str) -> None:
    """Print a line to stderr above any bar."""
    if not _silent:
        tqdm.write(message, file=sys.stderr)


@contextmanager
def silenced(silent: bool) -> Iterator[None]:
    """Show nothing meanwhile, where asked to: of several workers one is enough."""
    global _silent
    before, _silent = _silent, silent
    try:
        yield
    finally:
        _silent = before


def peak_memory_bytes() -> int:
    """Return the most resident memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
