"""torch's optimizers for the layers that are not sparse, and their state for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.errors import ConfigError
from xmlc.nn import Model
from xmlc.nn.output_layer import DenseOutput


class Optimizers:
    """Optimizers of encoder, penultimate layer and (where it is dense) output layer.

    Learning rates are set before every step; an absent part has no optimizer.
    """

    def __init__(self, model: Model) -> None:
        config = model.config
        self._parts: dict[str, torch.optim.Optimizer] = {}
        embeddings = list(model.encoder.parameters())
        if embeddings:
            self._parts["encoder"] = _sparse_optimizer(embeddings, config.dense_optimizer)
        if model.penultimate is not None:
            self._parts["penultimate"] = block_optimizer(
                model.penultimate.linear.parameters(), config.dense_optimizer
            )
        if isinstance(model.output, DenseOutput):
            self._parts["output"] = block_optimizer(model.output.linear.parameters(), config.output_optimizer)
            model.output.block_optimizer = self._parts["output"]

    @property
    def penultimate(self) -> torch.optim.Optimizer:
        """The penultimate layer's optimizer."""
        return self._parts["penultimate"]

    def step_encoder(self) -> None:
        """Update the encoder and free its gradient."""
        encoder = self._parts.get("encoder")
        if encoder is not None:
            encoder.step()
            encoder.zero_grad(set_to_none=True)

    def set_rates(self, dense: float, output: float) -> None:
        """Set the learning rates of this step."""
        for name, optimizer in self._parts.items():
            for group in optimizer.param_groups:
                group["lr"] = output if name == "output" else dense

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name; empty before the first step. Counters are int64 []."""
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(value)
            for name, _, _, value in self._states()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the state that `tensors` returned, without copying it unless to another device."""
        for part, optimizer in self._parts.items():
            for number, parameter in enumerate(_parameters(optimizer)):
                prefix = f"{part}.{number}."
                state = {
                    name.removeprefix(prefix): value.to(parameter.device)
                    if value.is_floating_point()
                    else int(value)
                    for name, value in tensors.items()
                    if name.startswith(prefix)
                }
                if state:
                    optimizer.state[parameter] = state

    def _states(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor, Any]]:
        for part, optimizer in self._parts.items():
            for number, parameter in enumerate(_parameters(optimizer)):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        yield f"{part}.{number}.{key}", optimizer, parameter, value


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def block_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a `BlockedLinear`'s parameters: torch's, with decoupled weight decay."""
    optimizer: torch.optim.Optimizer
    if config.kind == "adam":
        optimizer = torch.optim.Adam(
            parameters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
    else:
        momentum = config.momentum if config.kind == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=config.learning_rate, momentum=momentum, fused=True)
    if config.weight_decay > 0.0:
        optimizer.register_step_pre_hook(lambda each, *_: _decay(each, config.weight_decay))
    return optimizer


def _decay(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Shrink the weights of this step, but no bias, as the fused step does; torch's SGD would couple it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.dim() == 2:
                parameter.mul_(1.0 - group["lr"] * weight_decay)


def _sparse_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """An embedding sees a few of its rows in a step: only those are updated ("lazy" Adam)."""
    if config.kind == "adam":
        # No rate: every step sets it, and this class alone refuses a rate of 0 here.
        return torch.optim.SparseAdam(parameters, betas=(config.beta1, config.beta2), eps=config.eps)
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate)
    raise ConfigError(
        f"dense_optimizer.kind must be adam or sgd for sparse features (embeddings), found {config.kind!r}"
    )
