"""A dense layer whose gradient exists for one block of rows at a time.

With a million rows, or a penultimate layer of 131,072 units, the gradient of the whole weight is what does
not fit. Rows are updated block by block instead: a block's gradient is computed, given to the optimizer
and freed before the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from xmlc.parallel import ALONE, Workers

BLOCK_BYTES = 16 << 20
"""Of a block, unless told otherwise (``training.block_bytes``)."""


class BlockOptimizer(Protocol):
    """Updates parameters from their ``.grad``; parameters whose ``.grad`` is None are left alone."""

    def step(self) -> object:
        """Update every parameter that has a gradient."""


def rows_of_block(columns: int, block_bytes: int) -> int:
    """Return how many rows of float32 a block has."""
    return max(1, block_bytes // (4 * columns))


class Block:
    """Some rows of a `BlockedLinear`: views of its weight and bias, as parameters of an optimizer."""

    def __init__(self, rows: slice, weight: Tensor, bias: Tensor) -> None:
        self.rows = rows
        self.weight = Parameter(weight[rows], requires_grad=False)  # [block, column]
        self.bias = Parameter(bias[rows], requires_grad=False)  # [block]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the block's outputs [block, batch] at x [column, batch]."""
        return torch.addmm(self.bias[:, None], self.weight, x)

    def update(self, weight_gradient: Tensor, bias_gradient: Tensor, optimizer: BlockOptimizer) -> None:
        """Apply the gradients [block, column] and [block], and free them."""
        self.weight.grad, self.bias.grad = weight_gradient, bias_gradient
        optimizer.step()
        self.weight.grad = self.bias.grad = None


class BlockedLinear:
    """``weight @ x + bias[:, None]`` for x [column, batch]: batch innermost, as the native ops take it."""

    def __init__(self, weight: Tensor, bias: Tensor, block_bytes: int = BLOCK_BYTES) -> None:
        self.weight = weight  # [row, column] float32
        self.bias = bias  # [row] float32
        self.block_bytes = block_bytes
        rows, columns = weight.shape
        step = rows_of_block(columns, block_bytes)
        self.blocks = [
            Block(slice(first, min(first + step, rows)), weight, bias) for first in range(0, rows, step)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Return [row, batch]."""
        return torch.addmm(self.bias[:, None], self.weight, x)

    def move(self, device: torch.device) -> None:
        """Move the weights to a device; optimizers are made after that."""
        BlockedLinear.__init__(self, self.weight.to(device), self.bias.to(device), self.block_bytes)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the blocks' weights and biases."""
        for block in self.blocks:
            yield block.weight
            yield block.bias

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return ``weight.T @ gradient`` [column, batch] for a gradient [row, batch]."""
        return self.weight.T @ gradient

    def update(
        self, x: Tensor, gradient: Tensor, optimizer: BlockOptimizer, workers: Workers = ALONE
    ) -> None:
        """Update from the gradient [row, batch] of the outputs at x [column, batch].

        Each of several ``workers`` gives its own instances; the gradients of weights and bias are summed over
        them, in one collective for the bias and one for each block.
        """
        bias_gradient = workers.sum(gradient.sum(1))
        for block in self.blocks:
            weight_gradient = workers.sum(gradient[block.rows] @ x.T)
            block.update(weight_gradient, bias_gradient[block.rows], optimizer)

    def gradient_square_norm(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the squared norm of the weight and bias gradients without forming them.

        ``|G x^T|_F^2 = sum((G^T G) * (x^T x))``: two [batch, batch] products.
        """
        gram = gradient.T @ gradient
        return (gram * (x.T @ x + 1.0)).sum()  # + 1: the bias is a weight of a constant input
