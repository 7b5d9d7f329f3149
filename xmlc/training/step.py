"""One training step, in the order in which data flows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from xmlc.data.batches import Batch
from xmlc.losses.backward import backward
from xmlc.nn import Model
from xmlc.parallel import ALONE, Workers
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch


def training_step(
    model: Model,
    batch: Batch,
    optimizers: Optimizers,
    output_rate: float,
    step: int,
    clip_norm: float,
    stopwatch: Stopwatch,
    workers: Workers = ALONE,
) -> Tensor:
    """Update the whole model from one batch and return the loss, float64 [].

    Each of several ``workers`` gives its part of the batch, which may be empty; all take the same step, from
    the gradients of the whole batch's loss. Only dropout draws other numbers than one process would.

    The output layer updates itself inside the fused step and hands back the gradient of its input; the
    layers before it then follow, the penultimate layer block by block. ``step`` counts from 1 and, with the
    seed, decides all randomness of the step. The time goes to four phases of the stopwatch.
    """
    with stopwatch.phase("forward"):
        generator = step_generator(model.config.training.seed, step, workers.rank)
        hidden = model.hidden(batch, generator)  # [batch, hidden], autograd
        with torch.no_grad():
            features = model.features(hidden)  # [input, batch]
            direct = model.direct_features(batch, generator)  # [batch, feature] or None
    with stopwatch.phase("output_step"):
        loss, gradient = model.output.step(features, batch.labels, output_rate, step, direct, batch.skipped)
    with stopwatch.phase("backward"):
        gradient = _backward(model, hidden, features, gradient)
    with stopwatch.phase("dense_update"):
        _dense_update(model, hidden, gradient, optimizers, clip_norm, workers)
    return loss


def _backward(
    model: Model,
    hidden: Tensor,  # [batch, hidden], autograd
    features: Tensor,  # [input, batch]
    gradient: Tensor,  # of the features, [input, batch]; changed in place
) -> Tensor:
    """Take the gradient of the features back to the encoder's weights; return the pre-activations'."""
    with torch.no_grad():
        if model.penultimate is None:
            hidden_gradient = gradient.T
        else:
            gradient = model.penultimate.preactivation_gradient_(features, gradient)
            hidden_gradient = model.penultimate.hidden_gradient(gradient)
    if hidden.requires_grad:
        backward(hidden, hidden_gradient)
    return gradient


def _dense_update(
    model: Model,
    hidden: Tensor,  # [batch, hidden]
    gradient: Tensor,  # of the pre-activations, [input, batch]; changed in place
    optimizers: Optimizers,
    clip_norm: float,
    workers: Workers,
) -> None:
    """Update penultimate layer and encoder."""
    with torch.no_grad():
        sum_gradients([each for each in model.encoder.parameters() if each.requires_grad], workers)
        if clip_norm > 0.0:
            factor = _clip_factor(model, hidden, gradient, clip_norm, workers)
            gradient *= factor
            for encoder_gradient in _encoder_gradients(model):
                encoder_gradient.mul_(factor)
        if model.penultimate is not None:
            model.penultimate.update(hidden, gradient, optimizers.penultimate, workers)
    optimizers.step_encoder()


def step_generator(seed: int, step: int, rank: int = 0) -> torch.Generator:
    """Return the generator of one step's dropout: of (seed, step, rank) alone, so that runs resume."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step + (rank << 40)) % (1 << 63))


def sum_gradients(parameters: list[Tensor], workers: Workers, scale: float = 1.0) -> None:
    """Give every worker the sum of all workers' gradients, times a factor; who has none brings zeros.

    Those of embeddings are sparse, by rows; all others dense.
    """
    if workers.size == 1 or not parameters:
        return
    own = [0 if each.grad is None else 1 + int(each.grad.is_sparse) for each in parameters]
    kinds = workers.max(torch.tensor(own, device=parameters[0].device)).tolist()
    dense = []
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind == 2:
            gradient = parameter.grad
            if gradient is None:
                none = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
                values = parameter.new_empty(0, parameter.shape[1])
                gradient = torch.sparse_coo_tensor(none, values, parameter.shape, check_invariants=False)
            parameter.grad = workers.sum_sparse(gradient) * scale
        elif kind == 1:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dense.append(parameter.grad)
    workers.sum_gradients(dense)
    for gradient in dense:
        gradient.mul_(scale)


def _encoder_gradients(model: Model) -> list[Tensor]:
    """Return those of the parameters that are trained and were used."""
    return [each.grad for each in model.encoder.parameters() if each.grad is not None]


def gradient_square(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all gradients, dense or sparse."""
    values = (each.coalesce().values() if each.is_sparse else each for each in gradients)
    return sum((each.square().sum() for each in values), torch.zeros(()))


def _clip_factor(
    model: Model, hidden: Tensor, gradient: Tensor, clip_norm: float, workers: Workers
) -> Tensor:
    """Return what to multiply the gradients of encoder and penultimate layer by."""
    if model.penultimate is not None and workers.size > 1:
        lengths = [size[0] for size in workers.gather_sizes(len(hidden), device=hidden.device)]
        hidden = workers.gather_rows(hidden, lengths)
        gradient = workers.gather_rows(gradient.T, lengths).T
    square = gradient.new_zeros(()) + gradient_square(_encoder_gradients(model))
    if model.penultimate is not None:
        square += model.penultimate.linear.gradient_square_norm(hidden.T, gradient)
    return (clip_norm / (square.sqrt() + 1e-12)).clamp(max=1.0)
