"""The output-layer problems that kernels.py measures, and how much of their gradient is not zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from xmlc.ops import sparse_linear
from xmlc.sparsity.connectivity import random_connectivity

POSITIVES = 5  # of every instance, about as many as Amazon-670K has
BLOCK_LABELS = 1 << 16  # logits held at once where all are looked at
TILE_FLOATS = 1 << 19  # tile_floats of cuda_ext/cpu/tiling.h
MOST_TILED_INPUTS = 1 << 14  # kMostTiledInputs of it


@dataclass(frozen=True)
class Problem:
    """One batch and one output layer."""

    features: Tensor  # float32 [input, batch]
    weight: Tensor  # float32 or bfloat16 [label, fan_in]
    indices: Tensor  # uint16 or int32 [group, fan_in]
    bias: Tensor  # float32 [label]
    positive_offsets: Tensor  # int64 [batch + 1]
    positive_labels: Tensor  # int64 [pair], distinct within an instance
    group_size: int

    @property
    def labels(self) -> int:
        """Number of labels."""
        return self.weight.shape[0]

    @property
    def fan_in(self) -> int:
        """Inputs of a label."""
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        """Number of penultimate units."""
        return self.features.shape[0]

    @property
    def batch(self) -> int:
        """Number of instances."""
        return self.features.shape[1]

    @property
    def positive_instances(self) -> Tensor:
        """The instance of each pair, int64 [pair]."""
        return torch.arange(self.batch).repeat_interleave(self.positive_offsets.diff())


@dataclass(frozen=True)
class ActiveShares:
    """Shares whose gradient is not exactly zero."""

    logits: float
    """Of all (label, instance) pairs."""
    tiles: float
    """Of all (label, batch tile) pairs; the others skip their backward work."""
    labels: float
    """Of all labels; SGD leaves the others' weights alone."""


ALL_ACTIVE = ActiveShares(1.0, 1.0, 1.0)


def make_problem(
    labels: int, inputs: int, batch: int, fan_in: int, group_size: int = 1, seed: int = 0
) -> Problem:
    """Draw a layer of uniform random connections whose logits have a standard deviation of 1, and no bias."""
    generator = torch.Generator().manual_seed(seed)
    strata = torch.arange(POSITIVES) + torch.rand(batch, POSITIVES, generator=generator, dtype=torch.float64)
    return Problem(
        features=torch.randn(inputs, batch, generator=generator),
        weight=torch.randn(labels, fan_in, generator=generator).div_(fan_in**0.5),
        indices=random_connectivity(labels, inputs, fan_in, group_size, seed),
        bias=torch.zeros(labels),
        positive_offsets=POSITIVES * torch.arange(batch + 1),
        positive_labels=(strata * (labels / POSITIVES)).long().flatten(),
        group_size=group_size,
    )


def with_active_share(problem: Problem, share: float) -> Problem:
    """Give all labels one bias at which ``share`` of the (label, tile) pairs is active under squared hinge.

    A pair is active where the largest logit of the tile is above -1: so the bias is taken from the quantile
    of these largest logits, and positives, which are always active, come on top.
    """
    largest = torch.cat(
        [
            by_tile(logits, problem, -torch.inf).amax(2)
            for _, logits in logit_blocks(replace(problem, bias=torch.zeros(problem.labels)))
        ]
    ).flatten()
    above = min(max(1, round(share * largest.numel())), largest.numel())
    threshold = float(largest.kthvalue(largest.numel() - above + 1).values)
    return replace(problem, bias=torch.full((problem.labels,), -1.0 - threshold + 1e-4))


def squared_hinge_shares(problem: Problem) -> ActiveShares:
    """Count the non-zero squared-hinge gradients, 1 - t * logit > 0, from all logits."""
    logits_active = tiles_active = labels_active = 0
    for first, logits in logit_blocks(problem):
        active = logits > -1.0
        inside = (problem.positive_labels >= first) & (problem.positive_labels < first + len(logits))
        at = (problem.positive_labels[inside] - first, problem.positive_instances[inside])
        active[at] = logits[at] < 1.0
        tiles = by_tile(active, problem, False).any(2)
        logits_active += int(active.sum())
        tiles_active += int(tiles.sum())
        labels_active += int(tiles.any(1).sum())
    tiles_of_label = -(-problem.batch // tile_width(problem.batch, problem.inputs))
    return ActiveShares(
        logits_active / (problem.labels * problem.batch),
        tiles_active / (problem.labels * tiles_of_label),
        labels_active / problem.labels,
    )


def logit_blocks(problem: Problem) -> Iterator[tuple[int, Tensor]]:
    """Yield the first label and the logits [label, batch] of one block of labels after the other."""
    for first in range(0, problem.labels, BLOCK_LABELS):
        last = min(first + BLOCK_LABELS, problem.labels)
        groups = slice(first // problem.group_size, -(-last // problem.group_size))
        yield (
            first,
            sparse_linear(
                problem.features,
                problem.weight[first:last],
                problem.indices[groups],
                problem.bias[first:last],
                problem.group_size,
            ),
        )


def by_tile(values: Tensor, problem: Problem, padding: float) -> Tensor:
    """Cut [label, batch] into [label, tile, width] as the kernels do."""
    width = tile_width(problem.batch, problem.inputs)
    padded = functional.pad(values, (0, -problem.batch % width), value=padding)
    return padded.view(len(values), -1, width)


def tile_width(batch: int, inputs: int) -> int:
    """Return the instances of a batch tile: choose_tiling of cuda_ext/cpu/tiling.h."""
    width = 16
    if inputs > MOST_TILED_INPUTS:
        return width
    while width < 64 and width < batch and 2 * width * inputs <= TILE_FLOATS:
        width *= 2
    return width
