"""Update rules of the layers that are not sparse, by torch's functions, and their state for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim._functional import sparse_adam  # what SparseAdam calls; it alone has no public function
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from xmlc.config import OptimizerConfig
from xmlc.errors import ConfigError
from xmlc.nn import Model, TwoTower
from xmlc.nn.output_layer import DenseOutput
from xmlc.nn.transformer import TransformerEncoder

State = dict[str, Any]  # tensors, and counters that torch keeps as integers
Rule = Callable[[Tensor, Tensor, State, float], None]  # parameter, gradient, state, learning rate


class PartOptimizer:
    """Updates the parameters of a part that have a ``.grad``; what it keeps of each is torch's state.

    The classes of torch.optim do the same by the same functions, and with the same bits; but to make one
    imports torch's compiler, which takes 70 MB that are never used.
    """

    def __init__(self, parameters: Iterable[Tensor], rule: Rule, rate: float) -> None:
        self.parameters = list(parameters)
        self.rate = rate
        self.states: list[State] = [{} for _ in self.parameters]
        self._rule = rule

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if parameter.grad is not None:
                self._rule(parameter, parameter.grad, state, self.rate)

    def free_gradients(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class Optimizers:
    """Optimizers of encoder, penultimate layer and (where it is dense) output layer.

    Learning rates are set before every step; an absent part has no optimizer.
    """

    def __init__(self, model: Model | TwoTower) -> None:
        config = model.config
        self._parts: dict[str, PartOptimizer] = {}
        embeddings = [each for each in model.encoder.parameters() if each.requires_grad]
        if isinstance(model.encoder, TransformerEncoder):
            self._parts["transformer"] = block_optimizer(embeddings, config.encoder_optimizer)
        elif embeddings:
            self._parts["encoder"] = _sparse_optimizer(embeddings, config.dense_optimizer)
        if isinstance(model, TwoTower):
            self._parts["towers"] = block_optimizer(model.towers, config.dense_optimizer)
            return
        if model.penultimate is not None:
            self._parts["penultimate"] = block_optimizer(
                model.penultimate.linear.parameters(), config.dense_optimizer
            )
        if isinstance(model.output, DenseOutput):
            self._parts["output"] = block_optimizer(model.output.linear.parameters(), config.output_optimizer)
            model.output.block_optimizer = self._parts["output"]

    @property
    def penultimate(self) -> PartOptimizer:
        """The penultimate layer's optimizer."""
        return self._parts["penultimate"]

    def step_encoder(self) -> None:
        """Update the encoder, and what a two-tower model has behind it, and free their gradients."""
        for name in ("encoder", "transformer", "towers"):
            if name in self._parts:
                self._parts[name].step()
                self._parts[name].free_gradients()

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of all parts."""
        for optimizer in self._parts.values():
            yield from optimizer.parameters

    def set_rates(self, dense: float, output: float, transformer: float = 0.0) -> None:
        """Set the learning rates of this step."""
        rates = {"output": output, "transformer": transformer}
        for name, optimizer in self._parts.items():
            optimizer.rate = rates.get(name, dense)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name; empty before the first step. Counters are int64 []."""
        return {
            f"{part}.{number}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for part, optimizer in self._parts.items()
            for number, state in enumerate(optimizer.states)
            for key, value in state.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the state that `tensors` returned, without copying it unless to another device."""
        for part, optimizer in self._parts.items():
            for number, parameter in enumerate(optimizer.parameters):
                prefix = f"{part}.{number}."
                optimizer.states[number] = {
                    name.removeprefix(prefix): value.to(parameter.device)
                    if value.is_floating_point()
                    else int(value)
                    for name, value in tensors.items()
                    if name.startswith(prefix)
                }


def block_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> PartOptimizer:
    """Return the optimizer of a `BlockedLinear`'s parameters: torch's, with decoupled weight decay."""
    update = _adam(config) if config.kind == "adam" else _momentum(config)

    def rule(parameter: Tensor, gradient: Tensor, state: State, rate: float) -> None:
        # Weights shrink, but no bias, as in the fused step; torch's SGD would couple it to the gradient.
        if config.weight_decay > 0.0 and parameter.dim() == 2:
            parameter.mul_(1.0 - rate * config.weight_decay)
        update(parameter, gradient, state, rate)

    return PartOptimizer(parameters, rule, config.learning_rate)


def _adam(config: OptimizerConfig) -> Rule:
    def rule(parameter: Tensor, gradient: Tensor, state: State, rate: float) -> None:
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        adam(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=rate,
            weight_decay=0.0,
            eps=config.eps,
            maximize=False,
        )

    return rule


def _momentum(config: OptimizerConfig, embedding: bool = False) -> Rule:
    """SGD, of kind ``momentum`` with a buffer; the gradient of an embedding is sparse."""
    momentum = config.momentum if config.kind == "momentum" else 0.0

    def rule(parameter: Tensor, gradient: Tensor, state: State, rate: float) -> None:
        buffers: list[Tensor | None] = [state.get("momentum_buffer")]
        sgd(
            [parameter],
            [gradient],
            buffers,
            has_sparse_grad=embedding,
            foreach=False,
            fused=not embedding,
            weight_decay=0.0,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if momentum:
            state["momentum_buffer"] = buffers[0]

    return rule


def _sparse_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> PartOptimizer:
    """An embedding sees a few of its rows in a step: only those are updated ("lazy" Adam)."""
    if config.kind == "momentum":
        raise ConfigError(
            "dense_optimizer.kind must be adam or sgd for sparse features (embeddings), found 'momentum'"
        )
    rule = _sparse_adam(config) if config.kind == "adam" else _momentum(config, embedding=True)
    return PartOptimizer(parameters, rule, config.learning_rate)


def _sparse_adam(config: OptimizerConfig) -> Rule:
    def rule(parameter: Tensor, gradient: Tensor, state: State, rate: float) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        sparse_adam(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["step"]],
            eps=config.eps,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=rate,
            maximize=False,
        )

    return rule
