"""The instruction sets: none that the machine has is missing, and the choice among them is checked."""

import os
import subprocess
import sys
from pathlib import Path

import oracles
import pytest

from xmlc import native

NEEDED_FLAGS = {
    "generic": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


def machine_flags() -> set[str]:
    """Return the instruction sets that Linux reports; none where it does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    return {
        flag
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("flags")
        for flag in line.partition(":")[2].split()
    }


@pytest.mark.parametrize("isa", NEEDED_FLAGS)
def test_an_instruction_set_is_available_exactly_where_the_machine_has_it(isa: str) -> None:
    assert (isa in native.cpu.available_isas()) == (NEEDED_FLAGS[isa] <= machine_flags())


def test_describe_names_the_kernels_built_and_in_use(backend: str) -> None:
    description = native.describe()
    assert description["cpu_kernels"] == native.cpu.available_isas()
    assert description["cpu_kernels_in_use"] == backend == native.cpu.isa()


def test_the_former_instruction_set_comes_back() -> None:
    former = native.cpu.isa()
    for name in native.cpu.available_isas():
        with oracles.isa(name):
            assert native.cpu.isa() == name
        assert native.cpu.isa() == former


def import_with_isa(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", "from xmlc import native; print(native.cpu.isa())"],
        env={**os.environ, "XMLC_ISA": name},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_chooses_the_instruction_set() -> None:
    assert import_with_isa("generic").stdout == "generic\n"


def test_an_unknown_instruction_set_in_the_environment_is_refused_by_name() -> None:
    finished = import_with_isa("sse9")
    assert finished.returncode != 0
    assert "NativeError: native: XMLC_ISA must be one of generic" in finished.stderr
    assert "'sse9'" in finished.stderr


def test_few_multiply_adds_run_on_one_thread_and_many_on_all_of_torch() -> None:
    with oracles.threads(3):
        assert native.threads_for((1 << 20) - 1) == 1
        assert native.threads_for(1 << 20) == 3
