"""The connections a layer starts with."""

from __future__ import annotations

import torch
from torch import Tensor

from xmlc.errors import ConfigError
from xmlc.ops import redistribute
from xmlc.ops.checks import GROUP_SIZES, MOST_INPUTS, groups, integers


def index_dtype(input: int) -> torch.dtype:
    """Return the narrowest index dtype: uint16 for up to 65,536 inputs, else int32."""
    return torch.uint16 if input <= MOST_INPUTS[torch.uint16] else torch.int32


def random_connectivity(label: int, input: int, fan_in: int, group_size: int, seed: int) -> Tensor:
    """Draw ``fan_in`` distinct inputs for every group, uniformly at random.

    Returns:
        indices: uint16 or int32 [group, fan_in], group = ceil(label / group_size).

    Raises:
        ConfigError: There are fewer inputs than ``fan_in``, or another size is out of range.
        NativeError: An argument is no integer, or the seed is negative.
    """
    integers("connectivity", label=label, input=input, fan_in=fan_in, group_size=group_size, seed=seed)
    if fan_in > input:
        raise ConfigError(f"connectivity: fan_in must be at most the {input} inputs, found {fan_in}")
    if fan_in < 1 or label < 1:
        raise ConfigError(
            f"connectivity: label and fan_in must be at least 1, found label = {label}, fan_in = {fan_in}"
        )
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"connectivity: group_size must be one of {GROUP_SIZES}, found {group_size}")
    if input > MOST_INPUTS[torch.int32]:
        raise ConfigError(f"connectivity: input must be at most {MOST_INPUTS[torch.int32]}, found {input}")
    group = groups(label, group_size)
    indices = torch.arange(fan_in, dtype=torch.int32).to(index_dtype(input)).repeat(group, 1)
    # Redistributing all connections of any valid layer draws each group's inputs without replacement.
    redistribute(torch.zeros(group, fan_in), indices, input, fraction=1.0, seed=seed)
    return indices
