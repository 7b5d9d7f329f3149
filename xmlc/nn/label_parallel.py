"""A sparse output layer shared out to workers: each owns some of the labels, and sees the batch of all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from xmlc.checkpoint import CheckpointReader, Pieces, Storable
from xmlc.config import ModelConfig, RedistributionConfig
from xmlc.data.rows import CsrRows, Float32
from xmlc.nn.output_layer import SparseOutput
from xmlc.ops import LogitOffsets
from xmlc.ops.float8 import SCALE_LABELS, is_float8, scales, widen
from xmlc.parallel import OwnLabels, gather_compressed

_WEIGHTS_AT_ONCE = 1 << 20
"""Whose scores are counted."""


class GatheredBatch(NamedTuple):
    """The batch of all workers, in the order of their ranks."""

    features: Tensor  # [input, batch]
    positives: CsrRows  # [batch, own label]
    lengths: list[int]  # instances of each worker
    direct: CsrRows | None  # [batch, feature]
    skipped: CsrRows | None  # [batch, own label]
    further: list[list[int]]  # what each worker gave


class LabelParallelOutput:
    """`SparseOutput` of which every worker holds its own labels only; an `OutputLayer` like that.

    Equal to one process with the whole layer and the batch of all workers, but for the order of sums, and for
    what is drawn at random: rounding of bfloat16 and float8, inputs of moved connections. Every
    method communicates, so that all workers must call it.
    """

    def __init__(self, part: SparseOutput, own: OwnLabels) -> None:
        """Take this worker's part and the labels that it is of."""
        part.workers = own.workers
        self.part = part
        self.own = own
        self.workers = own.workers
        self.label = own.shares.label

    def gather(
        self,
        features: Tensor,
        positives: CsrRows,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
        *further: int,
    ) -> GatheredBatch:
        """Bring the batches of all workers together; see `step`.

        Takes 4 collectives, and one more for ``skipped`` and two for ``direct``.
        """
        parts = [each for each in (positives, skipped, direct) if each is not None]
        gathered, sizes = gather_compressed(self.workers, parts, features.device, *further)
        lengths = [size[0] for size in sizes]
        rows = features.T.to(self.part.feature_dtype)
        return GatheredBatch(
            self.workers.gather_rows(rows, lengths).T.contiguous(),
            self.own.columns(gathered[0]),
            lengths,
            None if direct is None else gathered[-1],
            None if skipped is None else self.own.columns(gathered[1]),
            [size[1 + len(parts) :] for size in sizes],
        )

    def step(
        self,
        features: Tensor,
        positives: CsrRows,
        learning_rate: float,
        step: int,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update the own labels from the batch of all workers.

        Arguments as of `OutputLayer.step`, of this worker's instances, of which there may be none.

        Returns:
            The loss of the whole batch, the same on all workers, and the gradient of the own features
            [input, batch]: its exact part, not to be averaged over workers.
        """
        batch = self.gather(features, positives, direct, skipped)
        loss, gradient = self.part.step(
            batch.features, batch.positives, learning_rate, step, batch.direct, batch.skipped
        )
        return self.workers.sum(loss), self.scatter(gradient, batch.lengths)

    def scatter(self, gradient: Tensor, lengths: list[int]) -> Tensor:
        """Add up the gradients [input, batch] of all workers' labels, and return this worker's instances'."""
        return self.workers.reduce_scatter_rows(gradient.T, lengths).T.contiguous()

    def top_labels(
        self,
        features: Tensor,
        k: int,
        direct: CsrRows | None = None,
        offsets: LogitOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.top_labels`; all workers give the same batch, and get the same answer."""
        own = self.own
        if offsets is not None:
            place = own.places(offsets.label)
            kept = place >= 0
            offsets = LogitOffsets.of(place[kept], offsets.instance[kept], offsets.value[kept])
        found = min(k, self.part.label)
        scores, labels = self.part.top_labels(features, found, direct, offsets)
        # A label of -1, where too few have a score, ends up as the last own one, and then as -1 again.
        labels = torch.from_numpy(own.labels).to(labels.device)[labels].masked_fill(labels < 0, -1)
        pad = (0, k - found)
        scores = functional.pad(scores, pad, value=-torch.inf)
        labels = functional.pad(labels, pad, value=-1)
        everywhere = [len(scores)] * self.workers.size
        scores, labels = (
            torch.cat(self.workers.gather_rows(each, everywhere).split(len(each)), 1)
            for each in (scores, labels)
        )
        order = labels.argsort(1)
        best = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
        return best.values[:, :k].contiguous(), labels.gather(1, order.gather(1, best.indices[:, :k]))

    def redistribute(self, config: RedistributionConfig, strength: float, step: int) -> int:
        """Move weak connections; see `SparseOutput.redistribute`. Takes 3 collectives.

        With ``scope = "layer"`` the weakest of all workers' connections move: each worker moves as many of
        its own as are among them.
        """
        if config.mode == "fraction" and config.scope == "layer":
            fraction = self.own_fraction(config.fraction * strength)
            config, strength = config.model_copy(update={"fraction": fraction}), 1.0
        return self.sum_over_workers(self.part.redistribute(config, strength, step))

    def sum_over_workers(self, value: int) -> int:
        """Return the sum of all workers' values."""
        return int(self.workers.sum(torch.tensor(value, device=self.part.weight.device)))

    def own_fraction(self, fraction: float) -> float:
        """Return the share of this worker's connections among the weakest ``fraction`` of the whole layer.

        Over all workers they are ``floor(fraction * group * fan_in + 1/2)``, as in `xmlc.ops.redistribute`;
        of those that are equally weak at the limit every worker moves about the same share. The limit is
        found by two counts over the bits of the scores, the upper and the lower half.
        """
        connections = self.own.row_count(self.part.group_size) * self.part.indices.shape[1]
        moved = int(fraction * connections + 0.5)
        if moved == 0:
            return 0.0
        own, all_workers = self._histogram(None)
        upper = int(torch.searchsorted(all_workers.cumsum(0), moved))
        own_moved, ties = int(own[:upper].sum()), moved - int(all_workers[:upper].sum())
        own, all_workers = self._histogram(upper)
        lower = int(torch.searchsorted(all_workers.cumsum(0), ties))
        own_moved += int(own[:lower].sum())
        ties -= int(all_workers[:lower].sum())
        equal = [size[0] for size in self.workers.gather_sizes(int(own[lower]), device=own.device)]
        first, last = (sum(equal[:rank]) for rank in (self.workers.rank, self.workers.rank + 1))
        own_moved += ties * last // sum(equal) - ties * first // sum(equal)
        return own_moved / self.part.indices.numel()

    def _histogram(self, upper: int | None) -> tuple[Tensor, Tensor]:
        """Count scores by the upper half of their bits, or those of one upper half by the lower.

        Returns:
            The counts of this worker and of all, int64 [65536].
        """
        own = torch.zeros(1 << 16, dtype=torch.int64, device=self.part.weight.device)
        for scores in self._scores():
            bits = scores.view(torch.int32)  # of numbers that are not negative, in their order
            high = bits >> 16
            own += torch.bincount(high if upper is None else bits[high == upper] & 0xFFFF, minlength=1 << 16)
        return own, self.workers.sum(own.clone())

    def _scores(self) -> Iterator[Tensor]:
        """Yield the scores of the own connections, the mean size of their weights, float32 [connection]."""
        part = self.part
        size, fan_in = part.group_size, part.weight.shape[1]
        step = SCALE_LABELS * max(1, _WEIGHTS_AT_ONCE // (SCALE_LABELS * fan_in))
        for first in range(0, part.label, step):
            scale = part.weight_scale
            weight = widen(
                part.weight[first : first + step],
                None if scale is None else scale[scales(first) : scales(first + step)],
            )
            weight = weight.float().abs()
            whole = len(weight) // size * size
            scores = [weight[:whole].view(-1, size, fan_in).mean(1), *weight[whole:].split(size)]
            scores[1:] = [rest.mean(0, keepdim=True) for rest in scores[1:]]
            yield torch.cat(scores).flatten().abs()  # NaN may have a sign

    def active_share(
        self,
        features: Tensor,
        positives: CsrRows,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> float:
        """See `SparseOutput.active_share`; all workers give the same batch, and get the same answer."""
        share = self.part.active_share(
            features,
            self.own.columns(positives),
            direct,
            None if skipped is None else self.own.columns(skipped),
        )
        active = torch.tensor(share * self.part.label, dtype=torch.float64, device=features.device)
        return float(self.workers.sum(active)) / self.label

    def rows_of_each(self, name: str) -> int:
        """Return the consecutive labels that a row of one of the `tensors` stands for."""
        return {"indices": self.part.group_size, "weight_scale": SCALE_LABELS}.get(name, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and state of the own labels by name, sharing memory; see `OwnLabels.whole`."""
        return self.part.tensors()

    def stored(self) -> dict[str, Storable]:
        """Return the tensors of all labels by name, as a checkpoint takes them; see `OwnLabels.pieces`."""
        stored: dict[str, Storable] = {}
        for name, own in self.tensors().items():
            of_each = self.rows_of_each(name)
            shape = (self.own.row_count(of_each), *own.shape[1:])
            stored[name] = Pieces(shape, own.dtype, partial(self.own.pieces, own, of_each))
        return stored

    def read(self, reader: CheckpointReader, prefix: str) -> None:
        """Read the own labels' rows of every tensor in place, from the names with this prefix.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: As `CheckpointReader.read_rows_into`.
        """
        for name, own in self.tensors().items():
            rows = self.own.shares.rows(self.workers.rank, self.rows_of_each(name))
            reader.read_rows_into(prefix + name, rows, own)

    def connect_direct(self, indices: NDArray[np.int32], weight: Float32) -> None:
        """See `SparseOutput.connect_direct`."""
        self.part.connect_direct(indices[self.own.labels], weight[self.own.labels])

    def move(self, device: torch.device) -> None:
        """See `OutputLayer.move`."""
        self.part.move(device)


def unit_of(model: ModelConfig) -> int:
    """Return how many consecutive labels must stay together."""
    return SCALE_LABELS if is_float8(getattr(torch, model.weight_dtype)) else model.group_size
