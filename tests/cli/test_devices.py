"""Machines whose GPU cannot be used: `xmlc info` says why, ``--device cuda`` is refused, the CPU trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result

from xmlc import native

Xmlc = Callable[..., Result]
COMMAND = ("--set", "training.epochs=1")
BUILT = "75, 90"


def driver_too_old() -> int:
    raise RuntimeError(
        "native: cudaGetDeviceCount must run on the device, found: CUDA driver version is insufficient"
    )


# The module of the kernels, whether torch finds a device, those that the build has code for; and the reason.
MACHINES = {
    "no kernels were built": (False, True, {0}, "CUDA kernels not built: no nvcc was found"),
    "no device": (True, False, set(), "torch "),
    "an old driver": (driver_too_old, True, set(), "CUDA driver version is insufficient"),
    "no code for the GPU": (
        True,
        True,
        set(),
        "cuda:0 is a GPU 0 (sm_70), and this build has code for 75, 90",
    ),
    "code for the other GPU": (
        True,
        True,
        {1},
        "cuda:0 is a GPU 0 (sm_70), and this build has code for 75, 90",
    ),
}


@pytest.fixture
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Stand for one of MACHINES; returns why its GPU cannot be used."""
    module, available, with_code, reason = MACHINES[request.param]
    count = module if callable(module) else lambda: 2
    fake = SimpleNamespace(architectures=BUILT, device_count=count, runs_on=with_code.__contains__)
    monkeypatch.setattr(native, "cuda", fake if module else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7 + device, 0))
    return reason


@pytest.mark.parametrize("reason", MACHINES, indirect=True)
def test_a_gpu_that_cannot_be_used(reason: str, xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    shown = {line[:14].strip(): line[15:] for line in xmlc("info").stdout.splitlines()}
    assert shown["CUDA device"].startswith("not used: ") and reason in shown["CUDA device"]
    assert shown["CUDA kernels"] == ("built for 75, 90" if native.cuda else native._cuda_problem)

    for verb in ("eval", "predict"):
        used = xmlc(verb, home / "dense run", "--device", "cuda")
        assert used.exit_code == 2 and reason in used.stderr and len(used.stderr.splitlines()) == 1

    train = ("train", home / "dense data", "--config", home / "config.toml", *COMMAND, "--out")
    refused = xmlc(*train, tmp_path / "cuda", "--device", "cuda")
    assert refused.exit_code == 2 and not (tmp_path / "cuda").exists()
    (line,) = refused.stderr.splitlines()
    assert line.startswith("xmlc: native: a CUDA device and CUDA kernels for it must be there, found: ")
    assert reason in line and line.endswith("(xmlc info shows what is there)")

    assert xmlc(*train, tmp_path / "cpu").exit_code == 0


@pytest.mark.parametrize("reason", ["code for the other GPU"], indirect=True)
def test_a_gpu_that_can_be_used(reason: str, xmlc: Xmlc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are asked about the device of the tensors, once."""
    asked = []
    monkeypatch.setattr(native, "_usable_devices", set())
    monkeypatch.setattr(native.cuda, "runs_on", lambda device: asked.append(device) or device == 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=5))
    for _ in range(2):
        module, where = native._backend(torch.device("cuda", 1), 1)
        assert module is native.cuda and where == {"queue": (1, 5, False)}
    assert asked == [1]
    with pytest.raises(native.NativeError, match="cuda:0 is a GPU 0"):
        native._backend(torch.device("cuda", 0), 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert "CUDA device    GPU 0 (sm_70), GPU 1 (sm_80)\n" in xmlc("info").stdout


def test_kernels_that_were_built_and_cannot_be_loaded() -> None:
    """As where a library that they need is missing: the package imports, and says so."""
    code = """
import sys
class Broken:
    def find_spec(self, name, path, target=None):
        if name == "xmlc._cuda":
            raise ImportError("libsomething.so.12: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from xmlc.cli import main
main(["info"])
"""
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    problem = "built, but not importable: libsomething.so.12: cannot open shared object file"
    assert f"CUDA kernels   {problem}\n" in told
    assert f"CUDA device    not used: CUDA kernels {problem}\n" in told
