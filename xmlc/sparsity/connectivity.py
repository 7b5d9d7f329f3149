"""The connections a layer starts with."""

from __future__ import annotations

import torch
from torch import Tensor

from xmlc.errors import ConfigError
from xmlc.ops import redistribute
from xmlc.ops.checks import groups

UINT16_INPUTS = 1 << 16


def index_dtype(input: int) -> torch.dtype:
    """Return the narrowest index dtype: uint16 for up to 65,536 inputs, else int32."""
    return torch.uint16 if input <= UINT16_INPUTS else torch.int32


def random_connectivity(label: int, input: int, fan_in: int, group_size: int, seed: int) -> Tensor:
    """Draw ``fan_in`` distinct inputs for every group, uniformly at random.

    Returns:
        indices: uint16 or int32 [group, fan_in], group = ceil(label / group_size).

    Raises:
        ConfigError: There are fewer inputs than ``fan_in``.
    """
    if fan_in > input:
        raise ConfigError(f"connectivity: fan_in must be at most the {input} inputs, found {fan_in}")
    group = groups(label, group_size)
    indices = torch.arange(fan_in, dtype=torch.int32).to(index_dtype(input)).repeat(group, 1)
    # Redistributing all connections of any valid layer draws each group's inputs without replacement.
    redistribute(torch.zeros(group, fan_in), indices, input, fraction=1.0, seed=seed)
    return indices
