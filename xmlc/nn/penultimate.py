"""The penultimate layer: many units for the sparse output layer to choose its inputs from."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from xmlc.nn.dense import BLOCK_BYTES, BlockedLinear, BlockOptimizer
from xmlc.parallel import ALONE, Workers


class PenultimateLayer:
    """``relu(weight @ hidden.T + bias[:, None])``: [batch, hidden] -> features [input, batch]."""

    def __init__(
        self,
        hidden: int,
        width: int,
        init: Literal["he", "glorot"],
        generator: torch.Generator,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        weight = torch.empty(width, hidden)
        if init == "he":  # He et al. 2015: hidden of unit variance gives features of unit second moment
            weight.normal_(0.0, math.sqrt(2.0 / hidden), generator=generator)
        else:
            bound = math.sqrt(6.0 / (hidden + width))
            weight.uniform_(-bound, bound, generator=generator)
        self.linear = BlockedLinear(weight, torch.zeros(width), block_bytes)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the features [input, batch] of hidden [batch, hidden]."""
        return self.linear(hidden.T).relu_()

    @staticmethod
    def preactivation_gradient_(features: Tensor, feature_gradient: Tensor) -> Tensor:
        """Turn the gradient of the features into that of their pre-activations, in place."""
        # Not a product with ``features > 0``, for which torch would make a float copy of the mask.
        return torch.ops.aten.threshold_backward.grad_input(
            feature_gradient, features, 0, grad_input=feature_gradient
        )

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """Return [batch, hidden] for the pre-activations' gradient [input, batch]."""
        return self.linear.input_gradient(gradient).T

    def update(
        self, hidden: Tensor, gradient: Tensor, optimizer: BlockOptimizer, workers: Workers = ALONE
    ) -> None:
        """Update the weights from the pre-activations' gradient, see `BlockedLinear.update`."""
        self.linear.update(hidden.T, gradient, optimizer, workers)
