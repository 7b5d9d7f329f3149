"""Runs a function in several gloo processes and returns what each of them found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = timedelta(seconds=50)


@contextmanager
def shared_import_path() -> Iterator[None]:
    """Let processes that start meanwhile find the tests' modules: they take over this process's path.

    Behind the installed package, which the source folder would hide.
    """
    sys.path.append(str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def in_workers(size: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Call ``function(rank, size, *arguments)`` in ``size`` gloo processes; fail where one of them fails."""
    with shared_import_path():
        multiprocessing.spawn(_worker, (size, function, folder, arguments), nprocs=size)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(size)]


def _worker(
    rank: int, size: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(function(rank, size, *arguments), folder / f"result-{rank}.pt")
    distributed.barrier()
    os._exit(0)  # torch's own end of gloo's threads now and then aborts a process that is done


def uneven_rows(rank: int, size: int, batch: int) -> slice:
    """Cut a batch unevenly and return a worker's part; every worker has at least one instance."""
    bounds = [0, *(batch * (part + 1) // size - (part + 1 < size) for part in range(size))]
    return slice(bounds[rank], bounds[rank + 1])
