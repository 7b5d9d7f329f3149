"""Learning rate and early stopping over a run; plain state that goes into checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from xmlc.config import ScheduleConfig, TrainingConfig


@dataclass
class Plateau:
    """Counts evaluations without a gain; the memory of early stopping and of the plateau schedule."""

    best: float = -math.inf
    stalled: int = 0

    def update(self, value: float, min_delta: float) -> bool:
        """Take an evaluation's value; return whether it gained more than ``min_delta``."""
        gained = value > self.best + min_delta
        if gained:
            self.best = value
        self.stalled = 0 if gained else self.stalled + 1
        return gained

    def state(self) -> dict[str, float | int]:
        """Return the state as JSON values."""
        return {key: value for key, value in asdict(self).items() if value != -math.inf}


@dataclass
class Schedule:
    """The factor on every learning rate."""

    config: ScheduleConfig
    total_steps: int
    plateau: Plateau
    plateau_factor: float = 1.0

    def factor(self, step: int) -> float:
        """Return the factor of this step (steps count from 1)."""
        config = self.config
        warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
        if config.kind == "constant":
            return warmup
        if config.kind == "plateau":
            return warmup * self.plateau_factor
        progress = (step - 1) / max(1, self.total_steps)
        course = 1.0 - progress if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return warmup * (config.final_fraction + (1.0 - config.final_fraction) * course)

    def evaluated(self, value: float) -> None:
        """Take a validation metric: on a plateau, lower the factor."""
        self.plateau.update(value, self.config.min_delta)
        if self.plateau.stalled >= self.config.patience:
            self.plateau.stalled = 0
            self.plateau_factor = max(self.config.min_fraction, self.plateau_factor * self.config.factor)


@dataclass
class EarlyStopping:
    """Whether to go on, and which epoch was the best."""

    config: TrainingConfig
    plateau: Plateau

    def evaluated(self, value: float) -> bool:
        """Take a validation metric; return whether it is the best so far."""
        return self.plateau.update(value, self.config.min_delta)

    @property
    def stop(self) -> bool:
        """Whether the metric has stalled for ``patience`` evaluations."""
        return self.config.patience > 0 and self.plateau.stalled >= self.config.patience
