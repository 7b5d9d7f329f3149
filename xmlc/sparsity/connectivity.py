"""The connections a layer starts with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.data.rows import CsrRows, Float32, Int64, unit_length
from xmlc.errors import ConfigError
from xmlc.ops import redistribute
from xmlc.ops.checks import GROUP_SIZES, MOST_INPUTS, groups, integers

GROUPS_DRAWN_AT_ONCE = 1 << 16


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
    indices = torch.empty(groups(label, group_size), fan_in, dtype=index_dtype(input))
    draw_connections(indices, input, seed)
    return indices


def draw_connections(
    indices: Tensor, input: int, seed: int, own: Int64 | None = None, group: int | None = None
) -> None:
    """Draw the connections of a layer, or of its ``own`` groups, in place.

    They are drawn in blocks of 65,536 groups, so that little is held besides, and each of several workers
    draws those that one process would have.

    Args:
        indices: uint16 or int32 [group, fan_in], or a row for each of ``own``.
        input: Inputs to draw from, see `random_connectivity`.
        seed: Another seed draws others.
        own: Groups of the layer, rising.
        group: With ``own``: how many the layer has.
    """
    group = len(indices) if group is None else group
    place = 0
    for number, first in enumerate(range(0, group, GROUPS_DRAWN_AT_ONCE)):
        count = min(GROUPS_DRAWN_AT_ONCE, group - first)
        if own is None:
            _draw(indices[first : first + count], input, seed, number)
            continue
        rows = own[slice(*np.searchsorted(own, (first, first + count)))] - first
        if len(rows):
            block = torch.empty(count, indices.shape[1], dtype=indices.dtype)
            _draw(block, input, seed, number)
            indices[place : place + len(rows)] = torch.from_numpy(block.numpy()[rows])
            place += len(rows)


def _draw(indices: Tensor, input: int, seed: int, number: int) -> None:
    """Draw a block of connections: redistributing all of any valid layer draws without replacement."""
    indices.copy_(torch.arange(indices.shape[1], dtype=torch.int32).to(indices.dtype))
    weight = torch.zeros(indices.shape, dtype=torch.bfloat16)
    redistribute(weight, indices, input, fraction=1.0, new_value="keep", seed=seed, step=number)


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
