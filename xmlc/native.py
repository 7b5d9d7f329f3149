"""Loads the native core once and says what this build and this machine can do."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from xmlc.errors import NativeError

if TYPE_CHECKING:
    import torch

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

_cuda_problem = "not built: no nvcc was found when this was installed, or XMLC_CUDA was OFF"
cuda: Any = None
try:
    cuda = import_module("xmlc._cuda")  # cuda_ext/bindings/cuda.cpp
except ModuleNotFoundError:
    pass
except ImportError as error:
    _cuda_problem = f"built, but not importable: {error}"

_requested = os.environ.get("XMLC_ISA")
if _requested:
    if _requested not in cpu.available_isas():
        raise NativeError(
            f"native: XMLC_ISA must be one of {', '.join(cpu.available_isas())} on this machine, "
            f"found {_requested!r}; unset it to take the best"
        )
    cpu.set_isa(_requested)


def run(
    op: str,
    device: torch.device,
    multiply_adds: int,
    *,
    layer: dict[str, Any],
    offsets: dict[str, int] | None = None,
    **arguments: Any,
) -> None:
    """Call a native op of the device's backend; torch owns (and counts) the memory of its workspace.

    Args:
        op: Name of the op in the native modules.
        device: Where all its tensors are.
        multiply_adds: Size of the work, from which the CPU's number of threads follows.
        layer: Arguments of the module's ``Layer``.
        offsets: Arguments of the module's ``LogitOffsets``, for the ops that take them.
        arguments: The op's other arguments.
    """
    import torch

    module, where = _backend(device, multiply_adds)
    arguments = {**where, "layer": module.Layer(**layer), **arguments}
    if offsets is not None:
        arguments["offsets"] = module.LogitOffsets(**offsets)
    call = getattr(module, op)
    size_bytes = call(workspace=0, **arguments)
    _count_workspace(size_bytes)
    slack = _slack_bytes(module, size_bytes)
    workspace = torch.empty(max(1, size_bytes + slack), dtype=torch.uint8, device=device)
    address = workspace.data_ptr()
    if slack:
        address += -address % slack
        cpu.prefer_huge_pages(address, size_bytes)
    try:
        call(workspace=address, **arguments)
    except RuntimeError as error:  # threads refused by the system, or a launch by the driver
        raise NativeError(str(error)) from None


emulated: Any = None
"""Set by tests: the CUDA kernels on the emulator, which then take CPU tensors in the place of the CPU's."""


def _backend(device: torch.device, multiply_adds: int) -> tuple[Any, dict[str, Any]]:
    """Return the native module for a device, and what a call says about where to work."""
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        if device.index not in _usable_devices:
            require_cuda(device.index)
            _usable_devices.add(device.index)
        return cuda, {"queue": (device.index, torch.cuda.current_stream(device).cuda_stream, deterministic)}
    if emulated is not None:
        return emulated, {"queue": (0, 0, deterministic)}
    return cpu, {"threads": threads_for(multiply_adds)}


_usable_devices: set[int] = set()  # those that `require_cuda` found good: asking the driver takes time


def watch_pages(owner: object, address: int, size_bytes: int, message: str) -> None:
    """Let a mapped page that cannot be had end the process with this line, and not by a signal.

    That is while ``owner`` lives. The disk has failed or is full, or another program has cut the file short.
    Nothing of Python can run then. Where some 500 mappings are watched already, nothing changes.
    """
    if size_bytes and cpu.watch_pages(address, size_bytes, f"\nxmlc: {message}\n"):
        weakref.finalize(owner, cpu.forget_pages, address).atexit = False


def take_largest_workspace() -> int:
    """Return the bytes of the largest workspace since the last call; native code allocates nothing beside."""
    global _largest_workspace
    taken, _largest_workspace = _largest_workspace, 0
    return taken


_largest_workspace = 0


def _count_workspace(size_bytes: int) -> None:
    global _largest_workspace
    _largest_workspace = max(_largest_workspace, size_bytes)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device's kernels take features in bfloat16 as they are (`checks.narrow`)."""
    return device.type == "cuda" or emulated is not None


ON_DEVICE = 0
"""In place of a number of threads: the device's op is asked, which needs neither a device nor its kernels."""


def workspace_bytes(
    op: str, threads: int, *, layer: dict[str, Any], offsets: dict[str, int] | None = None, **arguments: Any
) -> int:
    """Ask an op what `run` would allocate for its workspace; addresses may be 0, sizes must be right.

    The CPU's op with so many threads, or the device's (`ON_DEVICE`).
    """
    if offsets is not None:
        arguments["offsets"] = cpu.LogitOffsets(**offsets)
    module = cpu.cuda_sizes if threads == ON_DEVICE else cpu
    size_bytes: int = getattr(module, op)(workspace=0, threads=threads, layer=cpu.Layer(**layer), **arguments)
    return size_bytes + _slack_bytes(module, size_bytes)


def _slack_bytes(module: Any, size_bytes: int) -> int:
    """Return room to start at a huge page; bytes that nothing touches take no memory."""
    return cpu.HUGE_PAGE if module is cpu and size_bytes >= cpu.HUGE_PAGE else 0


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


def why_no_cuda(device: int | None = None) -> str | None:
    """Return in one line why the CUDA kernels cannot be used here; None where they can.

    Args:
        device: Index of the device to use; None: torch's current one.
    """
    import torch

    if cuda is None:
        return f"CUDA kernels {_cuda_problem}"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch finds no CUDA device" if built else f"torch {torch.__version__} is built without CUDA"
    try:
        cuda.device_count()
        number = torch.cuda.current_device() if device is None else device
        if cuda.runs_on(number):
            return None
    except RuntimeError as error:
        return str(error)
    return (
        f"cuda:{number} is a {_device_name(number)}, and this build has code for {cuda.architectures} "
        "(the CMake setting XMLC_CUDA_ARCHITECTURES adds others)"
    )


def require_cuda(device: int | None = None) -> None:
    """Require that the CUDA kernels can be used on a device; None: torch's current one.

    Raises:
        NativeError: They were not built, there is no device, or this build has no code for it.
    """
    problem = why_no_cuda(device)
    if problem is not None:
        raise NativeError(
            f"native: a CUDA device and CUDA kernels for it must be there, found: {problem}; "
            "train on the device cpu, or install where nvcc and a device are (xmlc info shows what is there)"
        )


def describe() -> dict[str, Any]:
    """Return what was built, what was found on this machine, and what is in use."""
    import platform

    problem = why_no_cuda()
    return {
        "cpu_kernels": cpu.available_isas(),
        "cpu_kernels_in_use": cpu.isa(),
        "cuda_kernels": _cuda_problem if cuda is None else f"built for {cuda.architectures}",
        "cuda_device": _cuda_devices() if problem is None else f"not used: {problem}",
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "module": str(_module_path(cpu)),
    }


def _cuda_devices() -> str:
    import torch

    return ", ".join(_device_name(device) for device in range(torch.cuda.device_count()))


def _device_name(device: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def _module_path(module: ModuleType) -> str:
    return module.__file__ or "built in"
