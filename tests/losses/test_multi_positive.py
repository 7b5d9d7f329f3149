"""The multi-positive loss in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.sparse
import torch
import torch.nn.functional as functional
from contrastive import dense_loss, lists, problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xmlc.errors import ConfigError, DataError, XmlcError
from xmlc.losses import KINDS, MultiPositive, multi_positive_loss

every_kind = pytest.mark.parametrize("kind", KINDS)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


@every_kind
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("tile", [1, 3, 64])
def test_loss_and_gradients_equal_the_dense_formula(kind: Any, layout: Any, tile: int) -> None:
    queries, keys, positive = problem()
    inputs = [queries.requires_grad_(), keys.requires_grad_(), number(1.7), number(-0.3)]
    loss = multi_positive_loss(
        inputs[0],
        inputs[1],
        lists(positive),
        kind=kind,
        scale=inputs[2],
        bias=inputs[3],
        layout=layout,
        tile=tile,
    )
    truth = dense_loss(inputs[0], inputs[1], positive, kind, inputs[2], inputs[3])
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(3.0 * loss, inputs)
    theirs = torch.autograd.grad(3.0 * truth, inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-11, atol=1e-13)


@every_kind
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("tile", [1, 3, 64])
def test_ignored_pairs_are_neither_positives_nor_negatives(kind: Any, layout: Any, tile: int) -> None:
    queries, keys, positive = problem()
    ignored = torch.rand(positive.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    ignored[3], ignored[4] = True, ~positive[4]  # nothing is left; nothing but positives is left
    ignored[1, :5] = True  # of a row of positives only
    inputs = [queries.requires_grad_(), keys.requires_grad_(), number(1.7), number(-0.3)]
    loss = multi_positive_loss(
        inputs[0],
        inputs[1],
        lists(positive),
        ignored=lists(ignored),
        kind=kind,
        scale=inputs[2],
        bias=inputs[3],
        layout=layout,
        tile=tile,
    )
    truth = dense_loss(inputs[0], inputs[1], positive, kind, inputs[2], inputs[3], ignored)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    for our, their in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(truth, inputs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-11, atol=1e-13)


@every_kind
def test_gradients_pass_gradcheck(kind: Any) -> None:
    queries, keys, positive = problem(4, 6, 3)

    def loss(*inputs: Tensor) -> Tensor:
        return multi_positive_loss(
            inputs[0], inputs[1], lists(positive), kind=kind, scale=inputs[2], bias=inputs[3], tile=4
        )

    inputs = (queries.requires_grad_(), keys.requires_grad_(), number(1.3), number(0.2))
    assert torch.autograd.gradcheck(loss, inputs)


def test_diagonal_positives_give_clips_loss() -> None:
    texts, images = (functional.normalize(torch.randn(9, 6, dtype=torch.float64), dim=1) for _ in range(2))
    pairs = [[row] for row in range(9)]
    logits = 100.0 * images @ texts.T
    clip = (
        functional.cross_entropy(logits, torch.arange(9))
        + functional.cross_entropy(logits.T, torch.arange(9))
    ) / 2
    for kind in ("softmax", "decoupled_softmax"):
        ours = (
            multi_positive_loss(images, texts, pairs, kind=kind, scale=100.0, tile=4)
            + multi_positive_loss(texts, images, pairs, kind=kind, scale=100.0, tile=4)
        ) / 2
        torch.testing.assert_close(ours, clip)


# Of open_clip 3.3.0, one process: the value of `open_clip.loss.ClipLoss()(a, b, scale)`, and below of
# `SigLipLoss()(a, b, scale, bias)`, and the squared norm of its gradient by each side, at `recorded_pairs()`
# in float64.
OPEN_CLIP = [
    (1.0, 1.7814588670833031, (0.09045267448211855, 0.15633237906283967)),
    (20.0, 10.192981091776064, (85.33464987188114, 97.60663058720397)),
    (100.0, 50.422583452844975, (2242.776688614815, 2560.9552471220077)),
]
OPEN_CLIP_SIGLIP = [
    (10.0, -10.0, 9.81749130279842, (15.645237812867578, 17.154123111763276)),
    (2.0, -1.0, 3.1674866176756606, (0.7667875319568194, 0.8407591809245873)),
]


def recorded_pairs() -> list[Tensor]:
    """Return six pairs of unit vectors; two of the second side are equal."""
    rows = range(1, 7)
    sides = (
        [[n * m % 7 - 3.0 for m in range(1, 5)] for n in rows],
        [[n * m % 5 - 2.0 for m in range(2, 6)] for n in rows],
    )
    return [
        functional.normalize(torch.tensor(side, dtype=torch.float64), dim=1).requires_grad_()
        for side in sides
    ]


def check_recorded(loss: Tensor, sides: list[Tensor], value: float, squares: tuple[float, ...]) -> None:
    assert loss.item() == pytest.approx(value, rel=1e-12)
    found = [each.square().sum().item() for each in torch.autograd.grad(loss, sides)]
    assert found == pytest.approx(squares, rel=1e-11)


@pytest.mark.parametrize("kind", ["softmax", "decoupled_softmax"])
@pytest.mark.parametrize(("scale", "value", "squares"), OPEN_CLIP)
def test_diagonal_positives_give_open_clips_recorded_loss(
    kind: Any, scale: float, value: float, squares: tuple[float, ...]
) -> None:
    first, second = recorded_pairs()
    loss = MultiPositive(kind, temperature=1.0 / scale, tile=4).double()
    diagonal = [[row] for row in range(6)]
    both = (loss(first, second, diagonal) + loss(second, first, diagonal)) / 2
    # The module's scale is a float32 logarithm; the functional core takes the number itself.
    assert both.item() == pytest.approx(value, rel=1e-5)
    exact = [
        multi_positive_loss(a, b, diagonal, kind=kind, scale=scale, tile=4)
        for a, b in ((first, second), (second, first))
    ]
    check_recorded((exact[0] + exact[1]) / 2, [first, second], value, squares)


@pytest.mark.parametrize(("scale", "bias", "value", "squares"), OPEN_CLIP_SIGLIP)
def test_diagonal_positives_give_open_clips_recorded_sigmoid_loss(
    scale: float, bias: float, value: float, squares: tuple[float, ...]
) -> None:
    first, second = recorded_pairs()
    diagonal = [[row] for row in range(6)]
    loss = multi_positive_loss(first, second, diagonal, kind="sigmoid", scale=scale, bias=bias, tile=4)
    check_recorded(loss, [first, second], value, squares)


@every_kind
def test_rows_without_and_with_only_positives_are_finite_at_any_scale(kind: Any) -> None:
    queries = torch.ones(3, 4, requires_grad=True)
    keys = torch.ones(5, 4, requires_grad=True)
    loss = multi_positive_loss(queries, keys, [[], [0, 1, 2, 3, 4], [2]], kind=kind, scale=1e4, tile=2)
    loss.backward()
    for value in (loss, queries.grad, keys.grad):
        assert value is not None
        assert value.isfinite().all()
    assert queries.grad is not None
    assert queries.grad[0].abs().max() == 0.0


def test_rows_without_and_with_only_positives_have_loss_zero() -> None:
    queries, keys = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    loss = multi_positive_loss(queries, keys, [[], [0, 1, 2]], scale=100.0)
    loss.backward()
    assert loss.item() == 0.0
    assert queries.grad is not None
    assert queries.grad.abs().max() == 0.0


@every_kind
def test_bfloat16_at_scale_100_errs_no_more_than_the_plain_formula_in_bfloat16(kind: Any) -> None:
    queries, keys, positive = problem(16, 24, 32)
    low = [functional.normalize(value, dim=1).bfloat16().requires_grad_() for value in (queries, keys)]
    exact = [value.detach().double().requires_grad_() for value in low]
    scale, bias = torch.tensor(100.0), torch.tensor(0.0)
    plain = [value.detach().clone().requires_grad_() for value in low]
    truth = dense_loss(*exact, positive, kind, scale.double(), bias.double())
    low_truth = dense_loss(*plain, positive, kind, scale.bfloat16(), bias.bfloat16())
    loss = multi_positive_loss(*low, lists(positive), kind=kind, scale=scale, tile=7)
    assert abs(loss.item() - truth.item()) <= abs(low_truth.item() - truth.item()) + 1e-4 * truth.item()
    for value in (loss, truth, low_truth):
        value.backward()
    for ours, theirs, right in zip(low, plain, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and right.grad is not None
        error, budget = (ours.grad - right.grad).norm(), (theirs.grad - right.grad).norm()
        assert error <= budget + 1e-3 * right.grad.norm()


def test_positives_come_as_lists_rows_matrices_or_padded_tensors() -> None:
    queries, keys, positive = problem()
    rows = lists(positive)
    width = max(map(len, rows))
    padded = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    expected = multi_positive_loss(queries, keys, rows)
    matrix = scipy.sparse.csr_array(positive.numpy().astype(float))
    for given in (matrix, padded, [row + row for row in rows]):
        assert multi_positive_loss(queries, keys, given) == expected


def test_module_learns_scale_and_bias() -> None:
    queries, keys, positive = problem()
    loss = MultiPositive("sigmoid", temperature=0.5, bias=-1.0, learn_scale=True, learn_bias=True)
    loss(queries, keys, lists(positive)).backward()
    scale, bias = number(2.0), number(-1.0)
    dense_loss(queries, keys, positive, "sigmoid", scale, bias).backward()
    assert loss.log_scale.grad is not None and scale.grad is not None and bias.grad is not None
    assert math.isclose(loss.log_scale.grad.item(), 2.0 * scale.grad.item(), rel_tol=1e-5)
    assert math.isclose(loss.bias.grad.item(), bias.grad.item(), rel_tol=1e-5)  # type: ignore[union-attr]


def test_second_derivatives_are_refused() -> None:
    queries, keys, positive = problem()
    loss = multi_positive_loss(queries.requires_grad_(), keys, lists(positive))
    with pytest.raises(XmlcError, match="the loss: must be differentiated once, found create_graph=True"):
        torch.autograd.grad(loss, queries, create_graph=True)


class Largest(TorchDispatchMode):
    """Records the most elements that any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@every_kind
@pytest.mark.parametrize("layout", ["row", "column"])
def test_no_tensor_of_queries_by_keys_exists(kind: Any, layout: Any) -> None:
    queries, keys = torch.randn(300, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        positives = [[row] for row in range(300)]
        multi_positive_loss(queries, keys, positives, kind=kind, layout=layout, tile=32).backward()
    assert largest.elements <= 500 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": [[11]] + [[0]] * 6}, r"labels must lie in \[0, 11\), found 11"),
        ({"positives": [[0]] * 6}, "one row for each of the 7 embeddings, found 6"),
        ({"positives": [[0.5]] * 7}, "row 0 must be a list of integers"),
        (
            {"positives": scipy.sparse.csr_array((7, 10))},
            r"positives: a matrix must have one column for each of the 11 labels, found \[7, 10\]",
        ),
        ({"ignored": scipy.sparse.csr_array((7, 12))}, r"ignored: a matrix must .* found \[7, 12\]"),
        ({"positives": torch.ones(7, 11).long()}, "found rows of 11 numbers, only 0 and 1, which looks"),
        ({"queries": torch.full((7, 5), math.nan, dtype=torch.float64)}, "queries must be finite"),
        ({"queries": torch.zeros(7, 4, dtype=torch.float64)}, "the same d"),
        (
            {"queries": torch.zeros(7, 5, dtype=torch.int64)},
            r"queries must be a dense tensor \[query, d\] of float32, .*, found torch.int64 \[7, 5\] on cpu",
        ),
        ({"queries": [[0.0] * 5] * 7}, "queries must be a dense tensor .*, found list"),
        ({"keys": torch.zeros(11, 5).to_sparse()}, "keys must be a dense .*, found torch.sparse_coo"),
        ({"keys": torch.zeros(11, 5, device="meta")}, "keys must be a dense .* on meta"),
        ({"keys": torch.zeros(11, 5).to(torch.float8_e4m3fn)}, "keys must be a dense .*, found torch.float8"),
        ({"queries": torch.zeros(7, 0), "keys": torch.zeros(11, 0)}, r"queries must be .* \[7, 0\]"),
        ({"queries": torch.zeros(7, 5)}, "same d, dtype and device, found .*float32 cpu and .*float64 cpu"),
        (
            {"positives": torch.zeros(7, 2).long().to_sparse()},
            "tensor of labels must be dense .*sparse_coo",
        ),
        ({"positives": torch.zeros(7, 2, device="meta").long()}, "a tensor of labels must be dense .* meta"),
        ({"ignored": [[-1]] + [[0]] * 6}, r"ignored: labels must lie in \[0, 11\), found -1"),
        ({"scale": math.nan}, "scale must be one finite number, found nan"),
        ({"scale": torch.ones(2)}, r"scale must be one finite number, found torch.float32 \[2\]"),
        ({"scale": "20"}, "scale must be one finite number, found '20'"),
        ({"bias": math.inf}, "bias must be one finite number, found inf"),
        ({"bias": None}, "bias must be one finite number, found None"),
        ({"queries": torch.zeros(0, 5, dtype=torch.float64), "positives": []}, "must not be empty"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    queries, keys, positive = problem()
    given = {"queries": queries, "keys": keys, "positives": lists(positive)} | change
    with pytest.raises(DataError, match=message):
        multi_positive_loss(**given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "hinge"}, "kind must be"),
        ({"layout": "ring"}, "layout must be"),
        ({"tile": 0}, "tile must be"),
        ({"tile": 2.5}, "tile must be an integer of at least 1, found 2.5"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    queries, keys, positive = problem()
    with pytest.raises(ConfigError, match=message):
        multi_positive_loss(queries, keys, lists(positive), **settings)
    with pytest.raises(ConfigError, match=message):
        MultiPositive(**settings)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, 1e-320, None, "a"])
def test_a_temperature_that_is_not_positive_is_refused(temperature: Any) -> None:
    with pytest.raises(ConfigError, match="MultiPositive: temperature must be a number from 1e-30 to 1e30"):
        MultiPositive(temperature=temperature)


@pytest.mark.parametrize("bias", [math.nan, math.inf, None, "a"])
def test_a_bias_that_is_no_number_is_refused(bias: Any) -> None:
    with pytest.raises(ConfigError, match="MultiPositive: bias must be a finite number, found"):
        MultiPositive(bias=bias)


@pytest.mark.parametrize("name", ["learn_scale", "learn_bias", "gather_across_devices"])
def test_a_flag_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"MultiPositive: {name} must be True or False, found 'yes'"):
        MultiPositive(**{name: "yes"})  # type: ignore[arg-type]


def test_a_group_that_is_none_of_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MultiPositive: group must be a torch\.distributed process group"):
        MultiPositive(group=3)  # type: ignore[arg-type]
