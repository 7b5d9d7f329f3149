"""The connections a layer starts with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.data.rows import CsrRows, Float32, unit_length
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
    weight = torch.zeros(group, fan_in, dtype=torch.bfloat16)
    indices = torch.empty(group, fan_in, dtype=index_dtype(input))
    draw_connections(weight, indices, input, 1, seed)
    return indices


def draw_connections(
    weight: Tensor,
    indices: Tensor,
    input: int,
    group_size: int,
    seed: int,
    weight_scale: Tensor | None = None,
) -> None:
    """Draw the connections, [group, fan_in], of a layer that has its weights [label, fan_in], in place.

    The weights stay as they are: reading them saves making others, as large as the layer, for the draw. See
    `random_connectivity`.
    """
    indices.copy_(torch.arange(weight.shape[1], dtype=torch.int32).to(indices.dtype))
    # Redistributing all connections of any valid layer draws each group's inputs without replacement.
    redistribute(
        weight,
        indices,
        input,
        fraction=1.0,
        new_value="keep",
        group_size=group_size,
        seed=seed,
        weight_scale=weight_scale,
    )


@dataclass(frozen=True)
class DirectStart:
    """The direct connections that a layer starts with; -1 is no connection."""

    indices: NDArray[np.int32]  # [label, fan_in]
    weight: Float32  # [label, fan_in]


def direct_connectivity(
    features: CsrRows,
    labels: CsrRows,
    texts: CsrRows | None,
    fan_in: int,
    text_factor: float,
    positives_factor: float,
    max_frequency: float,
) -> DirectStart:
    """Connect every label to the strongest features of its profile, with their values as weights::

        profile[l] = text_factor * unit(texts[l]) + positives_factor * unit(sum of features of l's instances)

    Args:
        features: Of the training instances, [instance, feature].
        labels: Their labels, [instance, label].
        texts: Features of the labels' own texts, [label, feature], or None.
        fan_in: Connections of each label; a profile with fewer features leaves the rest unconnected.
        text_factor: See above.
        positives_factor: See above.
        max_frequency: Share of the instances beyond which a feature gets no connections.
    """
    label = labels.columns
    indices = np.full((label, fan_in), -1, np.int32)
    weight = np.zeros((label, fan_in), np.float32)
    instances = features.to_scipy()
    frequency = np.bincount(features.indices, minlength=features.columns) / max(features.rows, 1)
    rare = (frequency <= max_frequency).astype(np.float32)
    by_label = labels.to_scipy().T.tocsr()  # [label, instance]
    for first in range(0, label, _PROFILES_AT_ONCE):
        rows = np.arange(first, min(first + _PROFILES_AT_ONCE, label))
        profile = positives_factor * _unit(by_label[rows] @ instances)
        if texts is not None:
            profile = profile + text_factor * _unit(texts.take(rows).to_scipy())
        row = np.repeat(np.arange(len(rows)), np.diff(profile.indptr))
        profile.data *= rare[profile.indices]
        order = np.lexsort((profile.indices, -profile.data, row))  # ties go to the lowest feature
        rank = np.arange(len(row)) - profile.indptr[row]
        kept = (rank < fan_in) & (profile.data[order] > 0.0)
        place = (first + row[kept], rank[kept])
        indices[place] = profile.indices[order][kept]
        weight[place] = profile.data[order][kept]
    return DirectStart(indices, weight)


_PROFILES_AT_ONCE = 1024


def _unit(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    rows = CsrRows(matrix.indptr.astype(np.int64), matrix.indices, matrix.data, matrix.shape[1])
    return unit_length(rows).to_scipy()
