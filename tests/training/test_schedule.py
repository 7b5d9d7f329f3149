"""Learning rate over time, plateaus and early stopping."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from xmlc.config import ScheduleConfig, TrainingConfig
from xmlc.training.schedule import EarlyStopping, Plateau, Schedule


def schedule(total_steps: int = 100, **settings: Any) -> Schedule:
    base: dict[str, Any] = {"warmup_steps": 0, "final_fraction": 0.0}
    return Schedule(ScheduleConfig(**(base | settings)), total_steps, Plateau())


def test_constant_stays() -> None:
    assert [schedule(kind="constant").factor(step) for step in (1, 50, 100)] == [1.0, 1.0, 1.0]


def test_linear_falls_by_equal_steps_towards_its_end() -> None:
    course = schedule(kind="linear")
    assert [course.factor(step) for step in (1, 26, 51, 76)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert course.factor(100) == pytest.approx(0.01)


def test_cosine_falls_over_the_half() -> None:
    course = schedule(kind="cosine")
    assert [course.factor(step) for step in (1, 51)] == pytest.approx([1.0, 0.5])
    assert course.factor(26) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_course_ends_at_its_final_fraction(kind: str) -> None:
    course = schedule(10_000, kind=kind, final_fraction=0.2)
    assert course.factor(10_000) == pytest.approx(0.2, abs=1e-4)
    assert all(course.factor(step) >= 0.2 for step in range(1, 10_001, 500))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "plateau"])
def test_warm_up_rises_linearly_on_top_of_the_course(kind: str) -> None:
    plain, warm = schedule(kind=kind), schedule(kind=kind, warmup_steps=10)
    for step in (1, 5, 10, 11, 60):
        assert warm.factor(step) == pytest.approx(min(1.0, step / 10) * plain.factor(step))


def test_a_run_of_no_steps_has_a_factor() -> None:
    assert schedule(0, kind="linear").factor(1) == 1.0


def test_a_plateau_lowers_the_rate_after_patience_and_starts_counting_anew() -> None:
    course = schedule(kind="plateau", factor=0.5, patience=2, min_delta=0.01, min_fraction=0.1)
    factors = []
    for value in (0.1, 0.2, 0.2, 0.205, 0.2, 0.2, 0.3, 0.3, 0.3):
        course.evaluated(value)
        factors.append(course.factor(1))
    #         gain gain stall stall(<min_delta) -> half; stall stall -> half; gain stall stall -> half
    assert factors == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_a_plateau_does_not_fall_below_its_floor() -> None:
    course = schedule(kind="plateau", factor=0.5, patience=1, min_fraction=0.3)
    for _ in range(6):
        course.evaluated(0.0)
    assert course.factor(1) == 0.3


def test_a_constant_rate_ignores_evaluations() -> None:
    course = schedule(kind="constant", patience=1)
    for _ in range(6):
        course.evaluated(0.0)
    assert course.factor(1) == 1.0


def stopping(**settings: Any) -> EarlyStopping:
    return EarlyStopping(TrainingConfig(**settings), Plateau())


def test_training_stops_after_patience_evaluations_without_a_gain() -> None:
    early = stopping(patience=2, min_delta=0.01)
    stops = []
    for value in (0.1, 0.2, 0.2, 0.3, 0.305, 0.29):
        early.evaluated(value)
        stops.append(early.stop)
    assert stops == [False, False, False, False, False, True]


def test_the_best_is_what_gained() -> None:
    early = stopping(patience=2, min_delta=0.01)
    assert [early.evaluated(value) for value in (0.1, 0.2, 0.205, 0.3)] == [True, True, False, True]


def test_the_first_evaluation_is_the_best_even_if_it_is_zero() -> None:
    assert stopping(patience=2).evaluated(0.0)


def test_a_patience_of_zero_never_stops() -> None:
    early = stopping(patience=0)
    for _ in range(100):
        early.evaluated(0.0)
    assert not early.stop


@pytest.mark.parametrize("values", [[], [0.25], [0.25, 0.1]])
def test_the_memory_of_a_plateau_survives_json(values: list[float]) -> None:
    plateau = Plateau()
    for value in values:
        plateau.update(value, 0.0)
    assert Plateau(**json.loads(json.dumps(plateau.state(), allow_nan=False))) == plateau
