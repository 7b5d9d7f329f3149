"""When connections move during training, and how many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xmlc.config import RedistributionConfig


@dataclass(frozen=True)
class RedistributionPolicy:
    """The course of redistribution over a training run of ``total_steps``."""

    config: RedistributionConfig
    total_steps: int

    @property
    def last_step(self) -> int:
        """Last step after which connections may move."""
        return round(self.config.end * self.total_steps)

    def due(self, step: int) -> bool:
        """Return whether connections move after this step (steps count from 1)."""
        config = self.config
        return (
            config.interval_steps > 0
            and config.first_step <= step <= self.last_step
            and (step - config.first_step) % config.interval_steps == 0
        )

    def strength(self, step: int) -> float:
        """Return the factor on ``fraction`` or ``threshold`` after this step; it falls from 1 to 0."""
        if self.config.decay == "constant":
            return 1.0
        progress = (step - self.config.first_step) / max(1, self.last_step - self.config.first_step)
        if self.config.decay == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))
