"""Gradient caching: equal to one graph, in one process and in several."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive import lists, problem
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from workers import in_workers

from xmlc.errors import ConfigError, DataError, XmlcError
from xmlc.losses import GradientCache, MultiPositive

D = 5


class Towers(nn.Module):
    """An encoder with dropout for both sides, and a loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(D, 16), nn.Dropout(0.4), nn.Linear(16, 4)).double()
        self.loss = MultiPositive(temperature=0.7, learn_scale=True, tile=4).double()


def gradients(module: nn.Module) -> list[Tensor]:
    return [value.grad for value in module.parameters() if value.grad is not None]


def in_parts(encoder: Callable[[Tensor], Tensor], inputs: Tensor, size: int) -> Tensor:
    """Run the encoder over the same mini-batches in one graph."""
    return torch.cat([encoder(part) for part in inputs.split(size)])


def one_graph(size: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return loss, gradients and the next random number."""
    towers = Towers()
    queries, keys, positive = problem()
    torch.manual_seed(2)
    encoded = in_parts(towers.encoder, queries, size), in_parts(towers.encoder, keys, size)
    loss = towers.loss(*encoded, lists(positive))
    loss.backward()
    return loss.detach(), gradients(towers), torch.rand(3)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_gradients_equal_those_of_one_graph(size: int) -> None:
    truth, expected, drawn = one_graph(size)
    towers = Towers()
    queries, keys, positive = problem()
    cache = GradientCache(size)
    for _ in range(2):  # a second step finds the cache as new
        towers.zero_grad()
        torch.manual_seed(2)
        encoded = cache.embed(towers.encoder, queries), cache.embed(towers.encoder, keys)
        loss = towers.loss(*encoded, lists(positive))
        loss.backward()
        cache.backward()
        assert torch.equal(loss, truth)
        assert torch.equal(torch.rand(3), drawn), "the second pass drew no numbers of its own"
        for ours, right in zip(gradients(towers), expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-15)


def test_texts_and_tokens_are_cut_into_mini_batches() -> None:
    seen: list[Any] = []

    def encoder(part: Any) -> Tensor:
        seen.append(part)
        return torch.ones(len(part["ids"]) if isinstance(part, dict) else len(part), 2)

    cache = GradientCache(2)
    with torch.no_grad():
        assert cache.embed(encoder, ["a", "b", "c"]).shape == (3, 2)
        cache.embed(encoder, {"ids": torch.arange(3), "mask": torch.ones(3, 4)})
        assert cache.embed(encoder, []).shape == (0, 2)
    assert seen[:2] == [["a", "b"], ["c"]]
    assert [part["ids"].tolist() for part in seen[2:4]] == [[0, 1], [2]]
    assert seen[4] == []
    cache.backward()  # nothing was recorded


def test_a_loss_scale_and_a_frozen_encoder_are_as_without_caching() -> None:
    towers, frozen = Towers(), Towers().requires_grad_(False)
    queries, keys, positive = problem()
    cache = GradientCache(3)
    towers.eval()
    encoded = cache.embed(towers.encoder, queries), cache.embed(frozen.encoder, keys)
    (8.0 * towers.loss(*encoded, lists(positive))).backward()
    cache.backward()
    found = gradients(towers)
    towers.zero_grad()
    (8.0 * towers.loss(towers.encoder(queries), frozen.encoder(keys).detach(), lists(positive))).backward()
    assert gradients(frozen) == []
    frozen.eval()
    assert len(found) == 5
    assert all(value.isfinite().all() for value in found)


@pytest.mark.parametrize("inside", [True, False])
def test_the_second_pass_has_the_autocast_of_the_first(inside: bool) -> None:
    encoder = nn.Linear(4, 3)
    inputs = torch.randn(6, 4)
    cache = GradientCache(4)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = cache.embed(encoder, inputs)
        loss = embeddings.float().square().sum()
        if inside:
            loss.backward()
            cache.backward()
    if not inside:
        loss.backward()
        cache.backward()
    assert embeddings.dtype == torch.bfloat16
    found = encoder.weight.grad
    encoder.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum(encoder(part).float().square().sum() for part in inputs.split(4))
    loss.backward()
    assert found is not None and encoder.weight.grad is not None
    # One graph adds the mini-batches' gradients in bfloat16, with its 8 bits.
    torch.testing.assert_close(found, encoder.weight.grad, rtol=2**-7, atol=2**-7)


def own(rows: Any, rank: int, size: int) -> Any:
    """Cut unevenly; the first of several workers has no keys of 1 row and the last the most."""
    first = len(rows) * rank * rank // (size * size)
    return rows[first : len(rows) * (rank + 1) ** 2 // (size * size)]


def cached_step(rank: int, size: int) -> tuple[list[Tensor], list[int]]:
    """Return the gradients after DDP's mean, and how often each module reduced its gradients."""
    queries, keys, positive = problem(9, 13, D)
    towers = Towers().eval()
    encoder, loss = DistributedDataParallel(towers.encoder), DistributedDataParallel(towers.loss)
    reductions = [0, 0]

    def count(number, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        reductions[number] += 1
        return allreduce_hook(None, bucket)

    encoder.register_comm_hook(0, count)
    loss.register_comm_hook(1, count)
    cache = GradientCache(2)
    encoded = (
        cache.embed(encoder, own(queries, rank, size)),
        cache.embed(lambda part: encoder(part), own(keys, rank, size), module=encoder),
    )
    loss(*encoded, lists(own(positive, rank, size))).backward()
    cache.backward()
    return gradients(towers), reductions


@pytest.mark.parametrize("size", [1, 2, 4])
def test_workers_under_ddp_equal_one_process_and_reduce_once(size: int, tmp_path: Path) -> None:
    queries, keys, positive = problem(9, 13, D)
    assert size < 4 or len(own(queries, 0, size)) == 0, "a worker without queries"
    towers = Towers().eval()
    towers.loss(towers.encoder(queries), towers.encoder(keys), lists(positive)).backward()
    for found, reductions in in_workers(size, cached_step, tmp_path):
        assert reductions == [1, 1]
        for ours, right in zip(found, gradients(towers), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-13)


def test_misuse_is_named() -> None:
    for size in (0, True, 1.5):
        with pytest.raises(ConfigError, match="mini_batch_size must be an integer of at least 1"):
            GradientCache(size)  # type: ignore[arg-type]
    cache = GradientCache(2)
    with pytest.raises(DataError, match=r"all inputs must have one length, found \{'a': 3, 'b': 2\}"):
        cache.embed(nn.Linear(1, 1), {"a": torch.ones(3, 1), "b": torch.ones(2, 1)})
    with pytest.raises(DataError, match=r"with the 2 rows it was given, found \[2, 1, 1\]"):
        cache.embed(nn.Linear(1, 1), torch.ones(3, 1, 1))
    with pytest.raises(DataError, match="found tuple"):
        cache.embed(lambda part: (part,), torch.ones(3, 1))  # type: ignore[arg-type, return-value]
    cache.embed(nn.Linear(1, 1), torch.ones(3, 1))
    with pytest.raises(XmlcError, match="found some without; call backward"):
        cache.backward()
    cache.clear()
    cache.backward()  # nothing is left to do


def test_only_one_mini_batch_has_a_graph_at_a_time() -> None:
    alive, most = 0, 0

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            nonlocal alive, most
            if torch.is_grad_enabled() or ctx.needs_input_grad[0]:
                alive += len(values)
                most = max(most, alive)
            ctx.rows = len(values)
            return values * math.pi

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            nonlocal alive
            alive -= ctx.rows
            return gradient * math.pi

    layer = nn.Linear(3, 3)
    cache = GradientCache(4)
    cache.embed(lambda part: Counted.apply(layer(part)), torch.randn(10, 3)).sum().backward()
    assert most == 0
    cache.backward()
    assert (alive, most) == (0, 4)


def test_gradients_of_a_backward_pass_that_failed_are_not_added_to_the_next() -> None:
    """The embeddings used to stay, so that the next step's gradients were the sum of both steps'."""
    layer, fails = nn.Linear(3, 3), True

    def encoder(part: Tensor) -> Tensor:
        if fails and torch.is_grad_enabled():
            raise ValueError("no memory")
        return layer(part)

    cache, inputs = GradientCache(4), torch.randn(10, 3)
    cache.embed(encoder, inputs).sum().backward()
    with pytest.raises(ValueError, match="no memory"):
        cache.backward()
    fails = False
    cache.embed(encoder, inputs).sum().backward()
    cache.backward()
    assert layer.bias.grad is not None
    assert torch.allclose(layer.bias.grad, torch.full((3,), 10.0))


def test_inputs_that_cannot_be_cut_are_refused() -> None:
    for inputs, found in ((None, "NoneType"), (iter([1]), "list_iterator"), ({"ids": 5}, "int")):
        with pytest.raises(DataError, match=f"inputs must have a length and be sliced, .* found {found}"):
            GradientCache(4).embed(lambda part: part, inputs)
