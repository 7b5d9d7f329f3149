"""Direct connections: from every label to a few of the instance's own sparse features, past all units."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.data.rows import CsrRows, Float32, Int64
from xmlc.ops import LogitOffsets


@dataclass(frozen=True)
class DirectLogits:
    """What the direct connections add to the logits of a batch, and what their update needs."""

    offsets: LogitOffsets
    connections: Int64
    """Flat places of the connections whose feature occurs in the batch, rising. [touched]"""
    first: Int64
    """First entry of each of them. [touched]"""
    values: Float32
    """Value of the feature. [entry]"""


class DirectConnections:
    """``logits[label, b] += sum_k weight[label, k] * features[b, indices[label, k]]``.

    Features are sparse: a batch holds few of them, and only the connections to these take part in its step
    ("lazy" Adam, as for the embeddings). An index of -1 is no connection. Connections stay where they start.

    Shapes: ``indices`` int32 and ``weight`` float32 [label, fan_in], and of Adam the two moments like them.
    """

    def __init__(self, label: int, feature_count: int, fan_in: int, optimizer: OptimizerConfig) -> None:
        self.feature_count = feature_count
        self.fan_in = fan_in
        self.optimizer = optimizer
        self.indices = torch.full((label, fan_in), -1, dtype=torch.int32)
        self.weight = torch.zeros(label, fan_in)
        self.first = torch.zeros(label, fan_in if optimizer.kind == "adam" else 0)
        self.second = torch.zeros_like(self.first)
        self._version = -1  # of the indices that the next was made from
        self._places: CsrRows  # flat places of the connections to each feature, [feature, place]

    def connect(self, indices: NDArray[np.int32], weight: Float32) -> None:
        """Start from connections and weights, [label, fan_in] each: the arrays become the layer's."""
        self.indices, self.weight = torch.from_numpy(indices), torch.from_numpy(weight)
        self._version = -1

    def logits(self, features: CsrRows) -> DirectLogits:
        """Return the sums of all instances [batch, feature] as entries by rising label."""
        by_feature = features.transposed()
        connections = self._to_features(np.flatnonzero(np.diff(by_feature.offsets)))
        entries = by_feature.take(self.indices.numpy().ravel()[connections])  # [touched, instance]
        assert entries.values is not None, "a transposed matrix has values"
        repeats = np.diff(entries.offsets)
        weight = np.repeat(self.weight.numpy().ravel()[connections], repeats)
        return DirectLogits(
            LogitOffsets.of(
                torch.from_numpy(np.repeat((connections // self.fan_in).astype(np.int32), repeats)),
                torch.from_numpy(entries.indices),
                torch.from_numpy(weight * entries.values),
            ),
            connections,
            entries.offsets[:-1],
            entries.values,
        )

    def _to_features(self, features: Int64) -> Int64:
        """Return the flat places of all connections to the given features, rising."""
        if self._version != self.indices._version:  # connected, or read from a checkpoint, since
            flat = self.indices.numpy().ravel()
            places = np.flatnonzero(flat >= 0)
            entries = scipy.sparse.coo_array(
                (np.ones(len(places), np.float32), (flat[places], places)),
                shape=(self.feature_count, len(flat)),
            )
            self._places = replace(CsrRows.from_scipy(entries, "direct connections"), values=None)
            self._version = self.indices._version
        return np.sort(self._places.take(features).indices).astype(np.int64)

    def update(self, logits: DirectLogits, learning_rate: float, step: int) -> None:
        """Move the touched weights by the gradients that the fused step has left in the offsets.

        Adam's moments of a connection change only in the steps that touch it; the bias correction counts all
        steps, as torch's ``SparseAdam`` does. Weight decay spares these weights.
        """
        if len(logits.connections) == 0:
            return
        products = logits.offsets.gradient.numpy() * logits.values
        gradient = torch.from_numpy(np.add.reduceat(products, logits.first))
        places = torch.from_numpy(logits.connections)
        weight = self.weight.view(-1)
        if self.optimizer.kind == "sgd":
            weight[places] -= learning_rate * gradient
            return
        beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
        first = torch.lerp(self.first.view(-1)[places], gradient, 1.0 - beta1)
        second = torch.lerp(self.second.view(-1)[places], gradient.square(), 1.0 - beta2)
        self.first.view(-1)[places] = first
        self.second.view(-1)[places] = second
        rate = learning_rate * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        weight[places] -= rate * first / (second.sqrt() + self.optimizer.eps)

    def tensors(self) -> dict[str, Tensor]:
        """Return connections, weights and optimizer state by name, sharing memory."""
        tensors = {"indices": self.indices, "weight": self.weight}
        if self.optimizer.kind == "adam":
            tensors |= {"state.first": self.first, "state.second": self.second}
        return tensors
