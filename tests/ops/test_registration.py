"""Each op is registered as torch.library wants it: schema, mutations, fake kernel, autograd."""

import oracles
import pytest
import torch
from oracles import BFLOAT16, FLOAT32, INT32, UINT16, Problem

from xmlc.ops import OptimizerState

types = pytest.mark.parametrize(
    ("weight_dtype", "index_dtype"),
    [(FLOAT32, INT32), (FLOAT32, UINT16), (BFLOAT16, INT32), (BFLOAT16, UINT16)],
    ids=["float32-int32", "float32-uint16", "bfloat16-int32", "bfloat16-uint16"],
)
group_sizes = pytest.mark.parametrize("group_size", [1, 16])


def small(group_size: int, weight_dtype: torch.dtype, index_dtype: torch.dtype) -> Problem:
    return oracles.make_problem(
        label=18,
        fan_in=3,
        input=10,
        batch=5,
        group_size=group_size,
        weight_dtype=weight_dtype,
        index_dtype=index_dtype,
    )


@types
@group_sizes
@pytest.mark.parametrize("differentiable", [False, True], ids=["plain", "differentiable"])
def test_sparse_linear_passes_opcheck(
    backend: str, group_size: int, weight_dtype: torch.dtype, index_dtype: torch.dtype, differentiable: bool
) -> None:
    problem = small(group_size, weight_dtype, index_dtype)
    for value in (problem.features, problem.weight, problem.bias):
        value.requires_grad_(differentiable)
    torch.library.opcheck(torch.ops.xmlc.sparse_linear.default, problem.layer)


@types
@group_sizes
def test_gradients_of_sparse_linear_pass_opcheck(
    group_size: int, weight_dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    problem = small(group_size, weight_dtype, index_dtype)
    incoming = torch.randn(18, 5, generator=torch.Generator().manual_seed(1))
    torch.library.opcheck(
        torch.ops.xmlc.sparse_linear_feature_gradient.default,
        (incoming, problem.weight, problem.indices, group_size, 10),
    )
    torch.library.opcheck(
        torch.ops.xmlc.sparse_linear_weight_gradient.default,
        (incoming, problem.features, problem.indices, group_size),
    )


@types
@group_sizes
def test_top_labels_passes_opcheck(
    group_size: int, weight_dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    features, weight, indices, bias, _ = small(group_size, weight_dtype, index_dtype).layer
    torch.library.opcheck(torch.ops.xmlc.top_labels.default, (features, weight, indices, bias, 4, group_size))


@types
@group_sizes
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("sgd", "squared_hinge"),
        ("momentum", "softmax"),
        ("adam", "bce"),
        ("label_adam", "decoupled_softmax"),
    ],
)
def test_fused_step_passes_opcheck(
    group_size: int, weight_dtype: torch.dtype, index_dtype: torch.dtype, kind: str, loss: str
) -> None:
    problem = small(group_size, weight_dtype, index_dtype)
    state = OptimizerState.zeros(kind, 18, 3)
    positive_weight = torch.linspace(0.5, 2.0, 18) if kind in ("sgd", "adam") else None
    arguments = (
        problem.features,
        torch.tensor([0, 3, 3, 17], dtype=torch.int32),
        torch.tensor([4, 0, 1, 2], dtype=torch.int32),
        problem.weight,
        problem.indices,
        problem.bias,
        state.weight_first,
        state.weight_second,
        state.bias_first,
        state.bias_second,
        positive_weight,
        group_size,
        loss,
        0.5,
        True,
        1e-3,
        kind,
        0.1,
        0.01,
        0.9,
        0.9,
        0.999,
        1e-8,
        1,
        7,
    )
    torch.library.opcheck(torch.ops.xmlc.fused_step.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fused_step_of_a_narrow_state_passes_opcheck(dtype: torch.dtype) -> None:
    problem = small(1, torch.float32, torch.int32)
    state = OptimizerState.zeros("adam", 18, 3, dtype)
    arguments = (
        problem.features,
        *(torch.tensor(pairs, dtype=torch.int32) for pairs in ([0, 3, 3, 17], [4, 0, 1, 2])),
        *(problem.weight, problem.indices, problem.bias),
        *(state.weight_first, state.weight_second, state.bias_first, state.bias_second),
        *(None, 1, "bce", 0.5, True, 1e-3, "adam", 0.1, 0.01, 0.9, 0.9, 0.999, 1e-8, 1, 7),
    )
    # The others compute with the arguments, which torch cannot in float8.
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.xmlc.fused_step.default, arguments, {"state_scale": state.scale}, test_utils=tests
    )


@types
@group_sizes
@pytest.mark.parametrize("states", [0, 1, 2])
@pytest.mark.parametrize("amount", [(0.5, None), (None, 0.5)], ids=["fraction", "threshold"])
def test_redistribute_passes_opcheck(
    group_size: int,
    weight_dtype: torch.dtype,
    index_dtype: torch.dtype,
    states: int,
    amount: tuple[float | None, float | None],
) -> None:
    problem = small(group_size, weight_dtype, index_dtype)
    state0, state1, *_ = [*(torch.ones(18, 3) for _ in range(states)), None, None]
    arguments = (
        problem.weight,
        problem.indices,
        state0,
        state1,
        10,
        group_size,
        *amount,
        "layer",
        "random",
        0.5,
        1,
        7,
    )
    torch.library.opcheck(torch.ops.xmlc.redistribute.default, arguments)
