"""Notices in the very step that a loss is no number any more, or has exploded, and says why it may have."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from xmlc.config import Config
from xmlc.data.batches import Batch
from xmlc.data.rows import CsrRows, TokenRows
from xmlc.errors import ConfigError
from xmlc.memory.plan import CHECKED_AT_ONCE

LARGE_FEATURE = 1e3


class DivergedError(ConfigError):
    """The loss of a step is not finite, or far above the first one."""


def check_loss(loss: float, first: float, config: Config) -> None:
    """Check the loss of a step against the run's first one that was not 0.

    Raises:
        DivergedError: It is not finite, or more than ``training.explosion_factor`` times the first.
    """
    factor = config.training.explosion_factor
    if not math.isfinite(loss):
        raise DivergedError(f"the loss must stay finite, found {loss}")
    if factor > 0.0 and first > 0.0 and loss > factor * first:
        raise DivergedError(
            f"the loss must stay below training.explosion_factor = {factor:g} times the first one "
            f"({first:.4g}), found {loss:.4g}"
        )


def check_weights(tensors: Mapping[str, Tensor]) -> None:
    """Check that a model may be saved: the update of a step shows in the loss of the next one only.

    Raises:
        DivergedError: A tensor holds what is no finite number.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = _bounds(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                raise DivergedError(f"the weights must stay finite, found {name} from {low} to {high}")


def _bounds(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the largest value, or NaN; torch compares no float8, whose pieces it can widen."""
    pieces = tensor.flatten().split(CHECKED_AT_ONCE) if tensor.itemsize == 1 else (tensor,)
    bounds = [torch.aminmax(piece.float() if piece.itemsize == 1 else piece) for piece in pieces]
    return float(torch.stack([low for low, _ in bounds]).min()), float(
        torch.stack([high for _, high in bounds]).max()
    )


def likely_cause(batch: Batch, config: Config, rate_factor: float) -> str:
    """Say what to look at first, and what to do."""
    largest = _largest_feature(batch)
    scaled = isinstance(batch.features, CsrRows) and config.data.unit_length
    if largest > LARGE_FEATURE and not scaled:
        return f"features as large as {largest:.4g} in this batch; scale them down"
    return high_rates(config, rate_factor)


def high_rates(config: Config, rate_factor: float) -> str:
    """Say that learning rates are too high, which settings they are, and what they are in this step."""
    if config.model.output == "two_tower":
        section = "encoder_optimizer" if config.encoder.trained else "dense_optimizer"
        rate = getattr(config, section).learning_rate
        return (
            f"a learning rate that is too high, {rate * rate_factor:.4g} in this step; lower "
            f"{section}.learning_rate ({rate:g}), or set training.clip_norm"
        )
    output, dense = config.output_optimizer.learning_rate, config.dense_optimizer.learning_rate
    return (
        f"learning rates that are too high, {output * rate_factor:.4g} and {dense * rate_factor:.4g} in this "
        f"step; lower output_optimizer.learning_rate ({output:g}) or dense_optimizer.learning_rate "
        f"({dense:g}), or set training.clip_norm"
    )


def _largest_feature(batch: Batch) -> float:
    features = batch.features
    if isinstance(features, TokenRows):
        return 1.0
    values = features.values if isinstance(features, CsrRows) else features
    return 1.0 if values is None else float(np.abs(values).max(initial=0.0))
