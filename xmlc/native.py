"""Loads the native core once and says what this build and this machine can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from xmlc.errors import NativeError

try:
    cpu: Any = import_module("xmlc._cpu")  # cuda_ext/bindings/cpu.cpp
except ImportError as error:
    _package = Path(__file__).resolve().parent
    _advice = "install with `pip install .` from the project's folder (needs a C++17 compiler)"
    if (_package.parent / "pyproject.toml").exists():
        _advice = (
            f"{_package} is the source, which hides an installed package: start Python in another folder, "
            "or install in place with `pip install -e .`"
        )
    raise NativeError(
        f"native: the CPU kernels must be built and importable, found: {error}; {_advice}"
    ) from error

_requested = os.environ.get("XMLC_ISA")
if _requested:
    if _requested not in cpu.available_isas():
        raise NativeError(
            f"native: XMLC_ISA must be one of {', '.join(cpu.available_isas())} on this machine, "
            f"found {_requested!r}; unset it to take the best"
        )
    cpu.set_isa(_requested)


def run(op: Callable[..., int], threads: int, **arguments: Any) -> None:
    """Call a native op with a workspace of the size it asks for; torch owns (and counts) the memory."""
    import torch

    size_bytes = op(threads=threads, workspace=0, **arguments)
    # Room to start at a huge page; bytes that nothing touches take no memory.
    slack = cpu.HUGE_PAGE if size_bytes >= cpu.HUGE_PAGE else 0
    workspace = torch.empty(size_bytes + slack, dtype=torch.uint8)
    address = workspace.data_ptr()
    if slack:
        address += -address % slack
        cpu.prefer_huge_pages(address, size_bytes)
    try:
        op(threads=threads, workspace=address, **arguments)
    except RuntimeError as error:  # threads refused by the system
        raise NativeError(str(error)) from None


def threads_for(multiply_adds: int) -> int:
    """Return torch's number of threads, or 1 where starting threads would cost more than they save.

    Results never depend on it. Within `kernel_threads` its number stands in for torch's.
    """
    import torch

    if multiply_adds < 1 << 20:
        return 1
    return _kernel_threads.get() or torch.get_num_threads()


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Give the native ops a number of threads of their own."""
    token = _kernel_threads.set(count)
    try:
        yield
    finally:
        _kernel_threads.reset(token)


_kernel_threads: ContextVar[int] = ContextVar("kernel_threads", default=0)  # 0: torch's


def describe() -> dict[str, Any]:
    """Return what was built, what was found on this machine, and what is in use."""
    import platform

    return {
        "cpu_kernels": cpu.available_isas(),
        "cpu_kernels_in_use": cpu.isa(),
        "cuda_kernels": "not built: this version has CPU kernels only",
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "module": str(_module_path(cpu)),
    }


def _module_path(module: ModuleType) -> str:
    return module.__file__ or "built in"
