"""Every test of a kernel runs once on each instruction set that this machine has."""

from collections.abc import Iterator

import oracles
import pytest

from xmlc import native


@pytest.fixture(params=native.cpu.available_isas())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the instruction set of the native ops, and the former one afterwards."""
    with oracles.isa(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine.

    Tests of threads choose their own number.
    """
    with oracles.threads(1):
        yield
