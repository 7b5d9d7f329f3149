"""A dense layer that is updated a block of rows at a time: same result, no whole gradient."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xmlc.config import OptimizerConfig
from xmlc.nn.dense import BlockedLinear
from xmlc.training.optimizers import block_optimizer

ROWS, COLUMNS, BATCH = 23, 9, 12
BLOCK_ROWS = 4


BLOCK_BYTES = BLOCK_ROWS * COLUMNS * 4


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(generator=generator)


def layer(generator: torch.Generator) -> BlockedLinear:
    weight, bias = normal(ROWS, COLUMNS, generator=generator), normal(ROWS, generator=generator)
    return BlockedLinear(weight, bias, BLOCK_BYTES)


def test_blocks_share_the_memory_of_all_rows_and_fit_the_budget(generator: torch.Generator) -> None:
    linear = layer(generator)
    assert [block.rows for block in linear.blocks] == [
        slice(first, min(first + BLOCK_ROWS, ROWS)) for first in range(0, ROWS, BLOCK_ROWS)
    ]
    for block in linear.blocks:
        assert block.weight.nbytes <= BLOCK_BYTES
        assert block.weight.data_ptr() == linear.weight[block.rows].data_ptr()
        assert block.bias.data_ptr() == linear.bias[block.rows].data_ptr()


def test_a_row_above_the_budget_is_a_block_of_its_own() -> None:
    assert len(BlockedLinear(torch.zeros(5, 3), torch.zeros(5), 1).blocks) == 5


def test_a_layer_that_moves_keeps_its_blocks(generator: torch.Generator) -> None:
    linear = layer(generator)
    before = [block.rows for block in linear.blocks]
    linear.move(torch.device("cpu"))
    assert [block.rows for block in linear.blocks] == before


def test_the_output_is_the_affine_map(generator: torch.Generator) -> None:
    linear, x = layer(generator), normal(COLUMNS, BATCH, generator=generator)
    exact = linear.weight.double() @ x.double() + linear.bias.double()[:, None]
    magnitude = linear.weight.double().abs() @ x.double().abs() + linear.bias.double().abs()[:, None]
    oracles.assert_within(linear(x), exact, oracles.gamma(COLUMNS + 1) * magnitude)


def test_the_input_gradient_is_that_of_autograd(generator: torch.Generator) -> None:
    linear, x = layer(generator), normal(COLUMNS, BATCH, generator=generator)
    gradient = normal(ROWS, BATCH, generator=generator)
    leaf = x.double().requires_grad_()
    (linear.weight.double() @ leaf + linear.bias.double()[:, None]).backward(gradient.double())
    magnitude = linear.weight.double().abs().T @ gradient.double().abs()
    assert leaf.grad is not None
    oracles.assert_within(linear.input_gradient(gradient), leaf.grad, oracles.gamma(ROWS) * magnitude)


def test_the_square_norm_is_that_of_the_real_gradients(generator: torch.Generator) -> None:
    linear, x = layer(generator), normal(COLUMNS, BATCH, generator=generator)
    gradient = normal(ROWS, BATCH, generator=generator)
    weight_gradient = gradient.double() @ x.double().T
    bias_gradient = gradient.double().sum(1)
    exact = weight_gradient.square().sum() + bias_gradient.square().sum()
    gram = gradient.double().abs().T @ gradient.double().abs()
    magnitude = (gram * (x.double().abs().T @ x.double().abs() + 1.0)).sum()
    bound = oracles.gamma(ROWS + COLUMNS + BATCH * BATCH + 3) * magnitude
    oracles.assert_within(linear.gradient_square_norm(x, gradient), exact, bound)


OPTIMIZERS = {
    "sgd": OptimizerConfig(kind="sgd", learning_rate=0.1),
    "sgd-decay": OptimizerConfig(kind="sgd", learning_rate=0.1, weight_decay=0.5),
    "momentum": OptimizerConfig(kind="momentum", learning_rate=0.1, momentum=0.8),
    "momentum-decay": OptimizerConfig(kind="momentum", learning_rate=0.1, momentum=0.8, weight_decay=0.5),
    "adam": OptimizerConfig(kind="adam", learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3),
    "adam-decay": OptimizerConfig(kind="adam", learning_rate=0.1, eps=1e-3, weight_decay=0.5),
}


def whole_updates(
    linear: BlockedLinear, config: OptimizerConfig, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Update copies of weight and bias as wholes, by the oracle's optimizer: torch's, decay decoupled."""
    weight, bias = linear.weight.to(dtype, copy=True), linear.bias.to(dtype, copy=True)
    state = oracles.OptimizerState.zeros(config.kind, ROWS, COLUMNS)
    optimizer = oracles.DenseOptimizer(config, config.learning_rate, weight, bias, state)
    for step, (x, gradient) in enumerate(batches, 1):
        optimizer.step(gradient.to(dtype) @ x.to(dtype).T, gradient.to(dtype).sum(1), step)
    return weight, bias


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_by_blocks_equal_updates_of_the_whole_weight(name: str, generator: torch.Generator) -> None:
    config = OPTIMIZERS[name]
    linear = layer(generator)
    batches = [
        (normal(COLUMNS, BATCH, generator=generator), normal(ROWS, BATCH, generator=generator))
        for _ in range(4)
    ]
    exact = whole_updates(linear, config, batches, torch.float64)
    plain = whole_updates(linear, config, batches, torch.float32)
    optimizer = block_optimizer(linear.parameters(), config)
    for x, gradient in batches:
        linear.update(x, gradient, optimizer)
    for found, true, own in zip((linear.weight, linear.bias), exact, plain, strict=True):
        oracles.assert_no_worse_than_plain(found, true, own, oracles.UNIT * true)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.nbytes)
        return result


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_gradient_larger_than_a_block_ever_lives(name: str, generator: torch.Generator) -> None:
    columns, batch = 100, 2
    block_bytes = BLOCK_ROWS * columns * 4
    linear = BlockedLinear(normal(ROWS, columns, generator=generator), torch.zeros(ROWS), block_bytes)
    optimizer = block_optimizer(linear.parameters(), OPTIMIZERS[name])
    with LargestTensor() as largest:
        for _ in range(2):
            linear.update(torch.ones(columns, batch), torch.ones(ROWS, batch), optimizer)
    assert 0 < largest.bytes <= block_bytes
    assert all(parameter.grad is None for parameter in linear.parameters())


def test_an_update_leaves_other_blocks_alone(generator: torch.Generator) -> None:
    """Their optimizer state too: a block without a gradient is not stepped by momentum."""
    linear = layer(generator)
    optimizer = block_optimizer(linear.parameters(), OPTIMIZERS["adam-decay"])
    linear.update(normal(COLUMNS, BATCH, generator=generator), torch.ones(ROWS, BATCH), optimizer)
    before = linear.weight.clone()
    first, *others = linear.blocks
    first.update(torch.ones_like(first.weight), torch.ones_like(first.bias), optimizer)
    assert not torch.equal(linear.weight[first.rows], before[first.rows])
    for block in others:
        assert torch.equal(linear.weight[block.rows], before[block.rows])
