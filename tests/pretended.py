"""A CUDA device that is not there: tensors say that they are on ``cuda:0`` and live in the CPU's memory.

What CUDA refuses is refused here: an operation on tensors of both devices, NumPy on a device's tensor. What
it would compute, torch computes on the CPU, and the kernels of `native.cpu` (or the emulated ones, where
XMLC_EMULATED names them) stand for those of the device. It knows nothing of streams, memory and speed.

To torch the tensors are on a second meta device, which needs no driver; the first is as ever.

What the tensors take is counted, so torch.cuda's questions about its allocator have answers: bytes of all
storages that a tensor on the device has, and their peak. Workspaces are as large as the device's kernels ask
for, whichever kernels stand for them; what torch allocates inside an operation of its own is not seen.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from xmlc import native

TOTAL_BYTES = 16 << 30
"""Of the device."""
CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta", 1)
_ACROSS = ("aten::_to_copy", "aten::copy_")  # what may see tensors of both devices


class _Allocator:
    """Counts the bytes of storages that are on the device."""

    def __init__(self) -> None:
        self.tensors: Counter[int] = Counter()  # by storage
        self.held = self.peak = 0

    def note(self, tensor: DeviceTensor) -> None:
        """Count the storages of a tensor until it is gone."""
        held = tensor.held
        parts = (held._indices(), held._values()) if held.layout is torch.sparse_coo else (held,)
        for part in parts:
            storage = part.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if self.tensors[key] == 0:
                self.held += size
                self.peak = max(self.peak, self.held)
            self.tensors[key] += 1
            weakref.finalize(tensor, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            del self.tensors[key]
            self.held -= size

    def start_again(self) -> None:
        """Count the peak from now on."""
        self.peak = self.held


allocator = _Allocator()


class DeviceTensor(Tensor):
    """Stands for a tensor on the device; ``held`` is where its values are."""

    held: Tensor
    device = CUDA
    is_cuda, is_meta = True, False

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride() if held.layout is torch.strided else None,
            storage_offset=held.storage_offset() if held.layout is torch.strided else None,
            dtype=held.dtype,
            layout=held.layout,
            device=META,
        )
        made.held = held
        allocator.note(made)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        """Return the values."""
        return self.held.tolist()

    def new(self, indices: DeviceTensor, values: DeviceTensor, size: torch.Size) -> DeviceTensor:
        """Return a sparse tensor; torch knows of none on the meta device."""
        return DeviceTensor(torch.sparse_coo_tensor(indices.held, values.held, size, check_invariants=True))

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"on the device: {self.held!r}"


class _Dispatch(TorchDispatchMode):
    """Lets torch make tensors on the device, and refuses to mix devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            return _run(func, args, kwargs or {})


class _Named(TorchFunctionMode):
    """Lets ``cuda`` name the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_placed, (args, kwargs or {}))
        if func is torch.tensor and kwargs.get("device") == META:  # its values would be lost
            return func(*args, **{**kwargs, "device": CPU}).to(META)
        return func(*args, **kwargs)


def _placed(value: Any) -> Any:
    named = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return META if named else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch where its tensors are, or where it is told to."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    on_device = [isinstance(value, DeviceTensor) for value in tensors]
    name = func._schema.name
    if any(on_device) and name not in _ACROSS:
        for value, here in zip(tensors, on_device, strict=True):
            # A number in a tensor without axes may be on the CPU, as everywhere in torch.
            assert here or value.dim() == 0, f"{name}: tensors of both devices, one is on the CPU"
    if name.startswith("xmlc::") and any(on_device):
        return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
    if kwargs.get("device") == torch.device("meta"):  # shapes alone, which take nothing
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    stays = on_device[0] if name == "aten::copy_" else any(on_device)
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]) in (META, CUDA)
        kwargs = {**kwargs, "device": CPU}
    wrappers = {id(value.held): value for value in tensors if isinstance(value, DeviceTensor)}
    args, kwargs = tree_map_only(DeviceTensor, lambda value: value.held, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        results = func(*args, **kwargs)
    if not stays:
        return results
    return tree_map_only(
        Tensor, lambda value: wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value), results
    )


class _CpuKernels:
    """The CPU's ops under the arguments of the device's, and asking for as much as those would."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(native.cpu, name)
        if name in ("Layer", "LogitOffsets"):
            return found

        def call(*, queue: Any, workspace: int, **arguments: Any) -> int:
            if workspace == 0:
                return int(getattr(native.cpu.cuda_sizes, name)(workspace=0, threads=0, **arguments))
            size = found(workspace=0, threads=1, **arguments)
            own = np.empty(size + 64, np.uint8)
            return int(found(workspace=own.ctypes.data + -own.ctypes.data % 64, threads=1, **arguments))

        return call


@contextmanager
def device() -> Iterator[None]:
    """Let ``cuda`` name the pretended device."""
    with pytest.MonkeyPatch.context() as patch:
        facts = native.describe()
        emulated = "XMLC_EMULATED" in os.environ
        patch.setattr(native, "cuda", oracles.emulated_module() if emulated else _CpuKernels())
        patch.setattr(native, "multiplies_bfloat16", lambda _: emulated)
        patch.setattr(native, "describe", lambda: facts)
        patch.setattr(native, "require_cuda", lambda _=None: None)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
        patch.setattr(torch.cuda, "get_rng_state", lambda _: torch.empty(0))  # the CPU's generator draws
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        total = SimpleNamespace(total_memory=TOTAL_BYTES)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: total)
        patch.setattr(torch.cuda, "memory_allocated", lambda: allocator.held)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.start_again)
        with _Named(), _Dispatch():
            yield
