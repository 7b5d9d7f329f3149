"""Every test of a kernel runs once on each instruction set that this machine has.

With XMLC_EMULATED set to the module that `scripts/emulate` builds, they run on the emulated CUDA kernels
instead, in the orders of threads that XMLC_EMULATED_ORDERS names.
"""

import os
from collections.abc import Iterator

import oracles
import pytest

from xmlc import native

BACKENDS = native.cpu.available_isas()
if "XMLC_EMULATED" in os.environ:
    BACKENDS = [f"emulated-{order}" for order in os.environ.get("XMLC_EMULATED_ORDERS", "forward").split(",")]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the kernels of the native ops, and the former ones afterwards."""
    with oracles.backend(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine.

    Tests of threads choose their own number.
    """
    with oracles.threads(1):
        yield
