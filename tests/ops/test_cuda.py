"""What only the CUDA kernels have: deterministic sums, grids of any size; and a machine without them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import SHAPES, Shape

from xmlc import native
from xmlc.errors import NativeError
from xmlc.ops import checks, logit_offsets, sparse_linear, top_labels

# The package's names are those of the functions.
fused_step, top_labels_op, redistribute = (
    import_module(f"xmlc.ops.{name}") for name in ("fused_step", "top_labels", "redistribute")
)

emulated = pytest.mark.skipif(
    "XMLC_EMULATED" not in os.environ, reason="scripts/emulate runs it, and scripts/check runs that"
)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@emulated
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.input * shape.label < 200_000], ids=str)
def test_deterministic_feature_gradients_are_within_the_budget_of_the_exact_ones(
    backend: str, shape: Shape
) -> None:
    problem = oracles.shape_problem(shape)
    incoming = torch.randn(shape.label, shape.batch, generator=torch.Generator().manual_seed(7))
    with deterministic():
        found = torch.ops.xmlc.sparse_linear_feature_gradient(
            incoming, problem.weight, problem.indices, shape.group_size, shape.input
        )
    dense = oracles.dense(problem.weight.double(), problem.indices, shape.group_size, shape.input)
    bound, _, _ = oracles.contraction_bounds(problem, incoming.double(), torch.zeros_like(incoming).double())
    oracles.assert_within(found, dense.T @ incoming.double(), bound, "feature gradient")


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@emulated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cpu_s_module_says_what_the_emulated_launchers_ask_for(
    shape: Shape, weight_dtype: torch.dtype, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = checks.absent_layer(shape.label, shape.fan_in, shape.input, shape.group_size, weight_dtype)
    narrow = weight_dtype == torch.bfloat16 and shape.group_size > 1

    def sizes() -> list[int]:
        return [
            fused_step.workspace_bytes(layer, shape.batch, 7, loss, "adam", native.ON_DEVICE, narrow),
            top_labels_op.workspace_bytes(layer, shape.batch, min(5, shape.label), native.ON_DEVICE),
            *(redistribute.workspace_bytes(layer, native.ON_DEVICE, within) for within in (False, True)),
        ]

    said = sizes()
    module = oracles.emulated_module()

    class Launchers:
        """The launchers under the arguments of the sizes; `Layer` must be their module's."""

        def __getattr__(self, name: str) -> Any:
            def call(*, threads: int, layer: Any, **arguments: Any) -> int:
                if "offsets" in arguments:
                    arguments["offsets"] = module.LogitOffsets(**logit_offsets.ABSENT)
                return int(getattr(module, name)(queue=(0, 0, False), layer=layer, **arguments))

            return call

    monkeypatch.setattr(native.cpu, "cuda_sizes", Launchers())
    monkeypatch.setattr(native.cpu, "Layer", module.Layer)
    assert sizes() == said


@emulated
def test_more_labels_than_a_grid_of_65535_blocks_of_128_are_all_computed(backend: str) -> None:
    """Labels on grid.y, clamped to 65,535 blocks, once left those beyond 8,388,480 without a gradient."""
    label = 65_535 * 128 + 33
    indices = torch.zeros(-(-label // 16), 1, dtype=torch.int32)
    weight = torch.arange(label, dtype=torch.float32)[:, None]
    logits = sparse_linear(torch.full((1, 1), 2.0), weight, indices, torch.ones(label), group_size=16)
    assert torch.equal(logits, 2.0 * weight + 1.0)


@emulated
def test_features_beyond_2_to_the_31_elements_are_found(backend: str) -> None:
    batch, input = 64, 2**25 + 3  # the last row begins beyond 2^31; pages that nothing touches take no memory
    features = torch.from_numpy(np.zeros((input, batch), np.float32))
    features[-1] = torch.arange(64.0)
    indices = torch.tensor([[input - 1], [0]], dtype=torch.int32)
    layer = (features, torch.tensor([[2.0], [3.0]]), indices, torch.zeros(2))
    assert torch.equal(sparse_linear(*layer)[0], 2.0 * torch.arange(64.0))
    assert top_labels(*layer, k=1)[0][:, 0].tolist() == [2.0 * b for b in range(64)]


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_than_2_to_the_31_logits_give_their_gradients(backend: str, dtype: torch.dtype) -> None:
    batch, label = 64, 2**25 + 16  # pages of zeros that nothing writes take no memory
    logits = np.zeros((label, batch), np.float32 if dtype == torch.float32 else np.uint16)
    incoming = torch.from_numpy(logits).view(dtype)
    incoming[-1] = torch.arange(64.0)
    incoming[0, 3] = 1.0
    indices = torch.zeros(label // 16, 1, dtype=torch.int32)
    indices[-1] = 1
    gradient = torch.ops.xmlc.sparse_linear_feature_gradient(
        incoming, torch.full((label, 1), 2.0, dtype=dtype), indices, 16, 2
    )
    assert torch.equal(gradient[1], 2.0 * torch.arange(64.0))
    assert torch.equal(gradient[0], 2.0 * (torch.arange(64) == 3))
    if dtype == torch.bfloat16:
        features = torch.ones(2, batch, dtype=dtype)
        found = torch.ops.xmlc.sparse_linear_weight_gradient(incoming, features, indices, 16)
        assert found[-1] == torch.arange(64.0).sum() and found[0] == 1.0 and found.count_nonzero() == 2


def test_a_device_that_is_not_there_is_refused_with_the_reason() -> None:
    reason = native.why_no_cuda()
    if reason is None:
        native.require_cuda()
        return
    with pytest.raises(NativeError, match=r"^native: a CUDA device") as error:
        native.require_cuda()
    assert reason in str(error.value) and native.describe()["cuda_device"] == f"not used: {reason}"


def test_a_build_without_cuda_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cuda", None)
    assert "not built" in native.why_no_cuda() and "not built" in native.describe()["cuda_kernels"]
