"""The stopwatch: what it counts, and that it goes on."""

from __future__ import annotations

import pytest

from xmlc.training import phases
from xmlc.training.phases import PHASES, Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stand in for the clock: reading it takes the next of these times."""
    times: list[float] = []
    monkeypatch.setattr(phases.time, "perf_counter", lambda: times.pop(0))
    return times


def test_a_phase_adds_up(clock: list[float]) -> None:
    clock += [1.0, 1.5, 10.0, 12.0]
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch.phase("forward"):
            pass
    assert stopwatch.seconds == dict.fromkeys(PHASES, 0.0) | {"forward": 2.5}


def test_a_phase_that_fails_counts(clock: list[float]) -> None:
    clock += [1.0, 3.0]
    stopwatch = Stopwatch()
    with pytest.raises(OSError), stopwatch.phase("checkpoint"):
        raise OSError
    assert stopwatch.seconds["checkpoint"] == 2.0


def test_the_wait_for_items_counts_and_their_use_does_not(clock: list[float]) -> None:
    clock += [0.0, 1.0, 50.0, 52.0, 90.0, 94.0]  # two items and the end
    stopwatch = Stopwatch()
    assert list(stopwatch.each("data", "ab")) == ["a", "b"]
    assert stopwatch.seconds["data"] == 7.0


def test_taking_starts_again_from_zero(clock: list[float]) -> None:
    clock += [0.0, 1.23456789]
    stopwatch = Stopwatch()
    with stopwatch.phase("validation"):
        pass
    assert stopwatch.take()["validation"] == 1.234568
    assert stopwatch.take() == dict.fromkeys(PHASES, 0.0)


def test_it_goes_on_from_what_a_run_had_counted(clock: list[float]) -> None:
    clock += [0.0, 1.0]
    stopwatch = Stopwatch()
    stopwatch.restore({"data": 2.0, "forgotten phase": 5.0})
    with stopwatch.phase("data"):
        pass
    assert stopwatch.seconds == dict.fromkeys(PHASES, 0.0) | {"data": 3.0}
