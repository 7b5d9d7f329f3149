"""Disks that refuse, at a chosen one of their changes or for want of rights or room; or that lose power."""

from __future__ import annotations

import ctypes
import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class PowerCut(BaseException):
    """Not an Exception, so that no handler takes it for an ordinary failure."""


@contextmanager
def failing_disk(after: int, failure: BaseException, forever: bool) -> Iterator[list[str]]:
    """Let ``after`` changes to the disk happen, then fail the next one, or that and every later one."""
    done: list[str] = []

    def guarded(name: str, change: Any, before_failing: Any = None) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            done.append(name)
            if len(done) == after + 1 or (forever and len(done) > after):
                if before_failing is not None and len(done) == after + 1:
                    before_failing(*arguments)
                raise failure
            return change(*arguments, **keywords)

        return call

    class Stream(io.BufferedWriter):
        def write(self, data: Any) -> int:
            write = super().write

            def write_half(data: Any) -> None:
                write(memoryview(data)[: len(data) // 2])
                self.flush()

            return guarded("write", write, write_half)(data)

    open_file = Path.open

    def opened(path: Path, mode: str = "r", **keywords: Any) -> Any:
        if mode in ("wb", "xb", "ab", "a"):
            stream = guarded("open", lambda: Stream(io.FileIO(path, mode.rstrip("b"))))()
            return stream if "b" in mode else io.TextIOWrapper(stream, **keywords)
        return open_file(path, mode, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opened)
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        yield done


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``most`` bytes: what a full disk or a quota does, for real."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("thread", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Have this thread obey the rights of files, also where it runs as root, whom Linux lets past them."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("rights of files bind root on Linux only, without its capabilities")
    libc = ctypes.CDLL(None, use_errno=True)
    header, capabilities = _CapabilityHeader(0x20080522, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), capabilities) == 0, os.strerror(ctypes.get_errno())
    before = capabilities[0].effective
    capabilities[0].effective = before & ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), capabilities) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        capabilities[0].effective = before
        assert libc.capset(ctypes.byref(header), capabilities) == 0, os.strerror(ctypes.get_errno())
