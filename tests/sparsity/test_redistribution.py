"""When connections move during training, and how many."""

from __future__ import annotations

from typing import Any

import pytest

from xmlc.config import RedistributionConfig
from xmlc.sparsity import RedistributionPolicy


def policy(total_steps: int = 100, **settings: Any) -> RedistributionPolicy:
    base: dict[str, Any] = {"interval_steps": 10, "first_step": 5, "end": 0.66, "decay": "cosine"}
    return RedistributionPolicy(RedistributionConfig(**(base | settings)), total_steps)


def due(policy: RedistributionPolicy, steps: int = 100) -> list[int]:
    return [step for step in range(1, steps + 1) if policy.due(step)]


def test_due_from_the_first_step_at_every_interval_until_the_end() -> None:
    assert due(policy()) == [5, 15, 25, 35, 45, 55, 65]


def test_due_at_the_last_step_itself() -> None:
    assert due(policy(end=0.65))[-1] == 65
    assert due(policy(end=0.64))[-1] == 55


def test_an_interval_of_one_is_due_at_every_step() -> None:
    assert due(policy(interval_steps=1, first_step=3, end=0.1)) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_an_interval_of_zero_is_never_due() -> None:
    assert due(policy(interval_steps=0)) == []


def test_a_first_step_after_the_end_is_never_due() -> None:
    assert due(policy(first_step=67)) == []


def test_the_paper_moves_after_step_1_1001_2001() -> None:
    course = policy(2500, interval_steps=1000, first_step=1, end=1.0)
    assert due(course, 2500) == [1, 1001, 2001]


@pytest.mark.parametrize("hundredths", range(0, 101))
def test_the_end_is_not_lost_to_binary_fractions(hundredths: int) -> None:
    """0.29 * 100 is 28.999999999999996: truncated, the last redistribution never came."""
    assert policy(end=hundredths / 100).last_step == hundredths


def test_constant_strength_stays() -> None:
    course = policy(decay="constant")
    assert [course.strength(step) for step in (5, 35, 65)] == [1.0, 1.0, 1.0]


def test_linear_strength_falls_from_1_to_0() -> None:
    course = policy(decay="linear", end=0.65)
    assert [course.strength(step) for step in (5, 20, 35, 65)] == pytest.approx([1.0, 0.75, 0.5, 0.0])


def test_cosine_strength_falls_from_1_over_a_half_to_0() -> None:
    course = policy(decay="cosine", end=0.65)
    expected = [1.0, 0.5 + 0.5**0.5 / 2, 0.5, 0.0]
    assert [course.strength(step) for step in (5, 20, 35, 65)] == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_strength_is_whole_where_first_and_last_step_are_one(decay: str) -> None:
    course = policy(decay=decay, first_step=10, end=0.1)
    assert due(course) == [10]
    assert course.strength(10) == 1.0
