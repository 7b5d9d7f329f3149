"""What does not fit is refused by a NativeError that names the op and what was found."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import oracles
import pytest
import torch
from oracles import BFLOAT16, INT32, UINT16, Problem

from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import OptimizerState, fused_step, redistribute, sparse_linear, top_labels


def step(problem: Problem, **changes) -> None:
    arguments = {
        "loss": "bce",
        "optimizer": OptimizerConfig(kind="sgd"),
        "learning_rate": 0.1,
        "state": OptimizerState(),
        "step": 1,
        "group_size": problem.group_size,
    }
    features, weight, indices, bias, _ = problem.layer
    fused_step(features, problem.offsets, problem.labels, weight, indices, bias, **{**arguments, **changes})


def top(problem: Problem, k: int = 2) -> None:
    features, weight, indices, bias, group_size = problem.layer
    top_labels(features, weight, indices, bias, k, group_size)


def prune(problem: Problem, **changes) -> None:
    arguments = {"fraction": 0.5, "group_size": problem.group_size, "input": 10}
    redistribute(problem.weight, problem.indices, **{**arguments, **changes})


OPS: dict[str, Callable[[Problem], None]] = {
    "sparse_linear": lambda problem: sparse_linear(*problem.layer),
    "fused_step": step,
    "top_labels": top,
    "redistribute": prune,
}


def small(group_size: int = 1) -> Problem:
    return oracles.make_problem(label=18, fan_in=4, input=10, batch=5, group_size=group_size)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """Return the same values, not contiguous."""
    return value.T.contiguous().T


def every_second(value: torch.Tensor) -> torch.Tensor:
    """Return the same values from a tensor twice as long, not contiguous."""
    return value.repeat_interleave(2)[::2]


def with_value(problem: Problem, value: int) -> Problem:
    indices = problem.indices.clone()
    indices[7, 2] = value
    return replace(problem, indices=indices)


def refusal(op: str, call: Callable[[], None], *found: str) -> None:
    """Require a NativeError that begins with the op's name and contains what was found."""
    with pytest.raises(NativeError, match=f"^{op}: ") as error:
        call()
    for part in found:
        assert part in str(error.value)


LAYER = {
    "weight of float16": (lambda p: replace(p, weight=p.weight.half()), "weight", "got float16 [18, 4]"),
    "weight of float64": (lambda p: replace(p, weight=p.weight.double()), "weight", "got float64 [18, 4]"),
    "weight of one axis": (lambda p: replace(p, weight=p.weight[0]), "weight", "got [4]"),
    "weight without axes": (lambda p: replace(p, weight=p.weight[0, 0]), "weight", "got []"),
    "no labels": (lambda p: replace(p, weight=p.weight[:0]), "weight", "got [0, 4]"),
    "fan_in of zero": (lambda p: replace(p, weight=p.weight[:, :0]), "weight", "got [18, 0]"),
    "strided weight": (
        lambda p: replace(p, weight=transposed(p.weight)),
        "weight",
        "must be contiguous",
        "got strides [1, 18]",
    ),
    "indices of int64": (lambda p: replace(p, indices=p.indices.long()), "indices", "got int64 [18, 4]"),
    "indices of int16": (lambda p: replace(p, indices=p.indices.short()), "indices", "got int16 [18, 4]"),
    "indices of another fan_in": (
        lambda p: replace(p, indices=p.indices[:, :3].contiguous()),
        "indices",
        "= [18, 4]",
        "got int32 [18, 3]",
    ),
    "indices of too few groups": (
        lambda p: replace(p, indices=p.indices[:17]),
        "indices",
        "= [18, 4]",
        "got int32 [17, 4]",
    ),
    "indices of every label though grouped": (
        lambda p: replace(p, group_size=16),
        "indices",
        "[group, fan_in] = [2, 4]",
        "got int32 [18, 4]",
    ),
    "strided indices": (
        lambda p: replace(p, indices=transposed(p.indices)),
        "indices",
        "must be contiguous",
        "got strides [1, 18]",
    ),
    "group_size of 3": (lambda p: replace(p, group_size=3), "group_size", "(1, 16, 32, 64)", "got 3"),
    "group_size of 0": (lambda p: replace(p, group_size=0), "group_size", "got 0"),
    "index of input": (lambda p: with_value(p, 10), "indices", "[0, 10)", "to 10"),
    "negative index": (lambda p: with_value(p, -1), "indices", "[0, 10)", "from -1"),
    "large index of uint16": (
        lambda p: replace(
            p, indices=torch.from_numpy(with_value(p, 0).indices.numpy().astype("uint16") + 65_526)
        ),
        "indices",
        "[0, 10)",
        "to 65535",
    ),
}

BATCH = {
    "features of float64": (
        lambda p: replace(p, features=p.features.double()),
        "features",
        "got float64 [10, 5]",
    ),
    "features of float16": (
        lambda p: replace(p, features=p.features.half()),
        "features",
        "got float16 [10, 5]",
    ),
    "features of one axis": (
        lambda p: replace(p, features=p.features[:, 0].contiguous()),
        "features",
        "got [10]",
    ),
    "features without axes": (lambda p: replace(p, features=p.features[0, 0]), "features", "got []"),
    "no instances": (lambda p: replace(p, features=p.features[:, :0]), "features", "got [10, 0]"),
    "strided features": (
        lambda p: replace(p, features=transposed(p.features)),
        "features",
        "must be contiguous",
        "got strides [1, 10]",
    ),
    "bias of bfloat16": (lambda p: replace(p, bias=p.bias.bfloat16()), "bias", "got bfloat16 [18]"),
    "bias of another length": (
        lambda p: replace(p, bias=p.bias[:17]),
        "bias",
        "[label] = [18]",
        "got float32 [17]",
    ),
    "bias of two axes": (lambda p: replace(p, bias=p.bias[:, None]), "bias", "got float32 [18, 1]"),
    "strided bias": (lambda p: replace(p, bias=every_second(p.bias)), "bias", "got strides [2]"),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", LAYER)
def test_a_layer_that_does_not_fit_is_refused(op: str, case: str) -> None:
    change, *found = LAYER[case]
    refusal(op, lambda: OPS[op](change(small())), *found)


@pytest.mark.parametrize("op", [op for op in OPS if op != "redistribute"])
@pytest.mark.parametrize("case", BATCH)
def test_features_or_a_bias_that_do_not_fit_are_refused(op: str, case: str) -> None:
    change, *found = BATCH[case]
    refusal(op, lambda: OPS[op](change(small())), *found)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("index_dtype", [INT32, UINT16], ids=["int32", "uint16"])
def test_an_index_changed_in_place_after_a_good_call_is_noticed(op: str, index_dtype: torch.dtype) -> None:
    problem = small()
    problem = replace(problem, indices=problem.indices.to(index_dtype))
    good = problem.indices.clone()
    OPS[op](problem)
    problem.indices[3, 1] = 10
    refusal(op, lambda: OPS[op](problem), "indices", "to 10")
    problem.indices.copy_(good)
    OPS[op](problem)


def through_numpy(indices: torch.Tensor, value: int) -> None:
    indices.numpy()[3, 1] = value


def through_data(indices: torch.Tensor, value: int) -> None:
    indices.data[3, 1] = value


def by_other_data(indices: torch.Tensor, value: int) -> None:
    other = indices.clone()
    other[3, 1] = value
    indices.data = other


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [10, 65_535])
@pytest.mark.parametrize("write", [through_numpy, through_data, by_other_data])
def test_an_index_changed_without_a_new_version_is_noticed(
    op: str, value: int, write: Callable[[torch.Tensor, int], None]
) -> None:
    """The range was once checked by version only, and such a write ended in a segmentation fault."""
    problem = small()
    problem = replace(problem, indices=problem.indices.to(UINT16))
    OPS[op](problem)
    write(problem.indices, value)
    refusal(op, lambda: OPS[op](problem), "indices", f"to {value}")


KINDS = {
    "a NumPy array for weight": (lambda p: replace(p, weight=p.weight.numpy()), "weight", "got ndarray"),
    "no weight": (lambda p: replace(p, weight=None), "weight must be a torch tensor", "got NoneType"),
    "a NumPy array for indices": (lambda p: replace(p, indices=p.indices.numpy()), "indices", "got ndarray"),
    "a sparse weight": (lambda p: replace(p, weight=p.weight.to_sparse()), "weight", "torch.sparse_coo"),
    "indices on another device": (lambda p: replace(p, indices=p.indices.to("meta")), "got cpu, meta"),
    "group_size as a string": (lambda p: replace(p, group_size="1"), "group_size", "integer", "got '1'"),
    "group_size as a float": (lambda p: replace(p, group_size=1.0), "group_size", "integer", "got 1.0"),
}
KINDS_OF_BATCH = {
    "a NumPy array for features": (lambda p: replace(p, features=p.features.numpy()), "features", "ndarray"),
    "sparse features": (lambda p: replace(p, features=p.features.to_sparse()), "features", ".to_dense()"),
    "no bias": (lambda p: replace(p, bias=None), "bias", "got NoneType"),
}


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op in OPS for case in KINDS]
    + [(op, case) for op in OPS if op != "redistribute" for case in KINDS_OF_BATCH],
)
def test_an_argument_of_another_kind_is_refused(op: str, case: str) -> None:
    change, *found = (KINDS | KINDS_OF_BATCH)[case]
    refusal(op, lambda: OPS[op](change(small())), *found)


@pytest.mark.parametrize("op", [op for op in OPS if op != "redistribute"])
def test_indices_that_fit_one_input_are_checked_against_another(op: str) -> None:
    problem = small()
    OPS[op](problem)
    narrow = replace(problem, features=problem.features[:9].contiguous())
    refusal(op, lambda: OPS[op](narrow), "indices", "[0, 9)")


@pytest.mark.parametrize("op", OPS)
def test_a_view_of_checked_indices_is_checked_itself(op: str) -> None:
    problem = small()
    OPS[op](problem)
    two = with_value(replace(problem, indices=problem.indices.repeat(2, 1)), 10)
    refusal(op, lambda: OPS[op](replace(problem, indices=two.indices[:18])), "indices", "to 10")


def state(kind: str, **changes: torch.Tensor | None) -> OptimizerState:
    return replace(OptimizerState.zeros(kind, 18, 4), **changes)


POSITIVES = {
    "offsets of int32": (lambda p: replace(p, offsets=p.offsets.int()), "positive_offsets", "got int32 [6]"),
    "offsets of another batch": (
        lambda p: replace(p, offsets=p.offsets[:-1]),
        "positive_offsets",
        "[batch + 1] = [6]",
        "got int64 [5]",
    ),
    "strided offsets": (
        lambda p: replace(p, offsets=every_second(p.offsets)),
        "positive_offsets",
        "got strides [2]",
    ),
    "offsets that do not begin at 0": (
        lambda p: replace(p, offsets=torch.tensor([1, 2, 3, 4, 5, 6]), labels=p.labels[:6]),
        "positive_offsets",
        "got 1 to 6",
    ),
    "offsets that end too early": (
        lambda p: replace(p, offsets=torch.tensor([0, 1, 2, 3, 4, 5]), labels=p.labels[:6]),
        "positive_offsets",
        "from 0 to 6",
        "got 0 to 5",
    ),
    "offsets that end too late": (
        lambda p: replace(p, offsets=torch.tensor([0, 1, 2, 3, 4, 7]), labels=p.labels[:6]),
        "positive_offsets",
        "from 0 to 6",
        "got 0 to 7",
    ),
    "offsets that fall": (
        lambda p: replace(p, offsets=torch.tensor([0, 4, 3, 4, 5, 6]), labels=p.labels[:6]),
        "positive_offsets",
        "must rise",
    ),
    "labels of float32": (lambda p: replace(p, labels=p.labels.float()), "positive_labels", "got float32"),
    "labels of int16": (lambda p: replace(p, labels=p.labels.short()), "positive_labels", "got int16"),
    "labels of two axes": (lambda p: replace(p, labels=p.labels[None]), "positive_labels", "got int64 [1, "),
    "strided labels": (
        lambda p: replace(p, labels=every_second(p.labels)),
        "positive_labels",
        "got strides [2]",
    ),
    "label too large": (
        lambda p: replace(p, labels=p.labels.clone().index_fill_(0, torch.tensor([1]), 18)),
        "positive_labels",
        "[0, 18)",
        "to 18",
    ),
    "label beyond int32": (
        lambda p: replace(p, labels=p.labels.clone().index_fill_(0, torch.tensor([1]), 2**32)),
        "positive_labels",
        "[0, 18)",
        "to 4294967296",
    ),
    "negative label": (
        lambda p: replace(p, labels=p.labels.clone().index_fill_(0, torch.tensor([1]), -1)),
        "positive_labels",
        "[0, 18)",
        "from -1",
    ),
}


@pytest.mark.parametrize("case", POSITIVES)
def test_positives_that_do_not_fit_are_refused(case: str) -> None:
    change, *found = POSITIVES[case]
    refusal("fused_step", lambda: step(change(small())), *found)


def adam(**changes) -> dict:
    return {"optimizer": OptimizerConfig(kind="adam"), "state": state("adam", **changes)}


STEP = {
    "unknown loss": (
        {"loss": "hinge"},
        "loss must be one of squared_hinge, bce, softmax, decoupled_softmax, got 'hinge'",
    ),
    "negative gradient_cutoff": (
        {"gradient_cutoff": -1e-9},
        "gradient_cutoff must be at least 0",
        "got -1e-09",
    ),
    "gradient_cutoff that is no number": ({"gradient_cutoff": math.nan}, "gradient_cutoff", "got nan"),
    "step of 0": ({"step": 0}, "step", "from 1", "got 0"),
    "step below 0": ({"step": -1}, "step", "from 1", "got -1"),
    "seed below 0": ({"seed": -1}, "seed must be at least 0", "got -1"),
    "scale as a string": ({"scale": "1"}, "scale must be a number", "got '1'"),
    "positive_weight as a NumPy array": ({"positive_weight": torch.ones(18).numpy()}, "got ndarray"),
    "seed beyond 64 bits": ({"seed": 2**64}, "seed", "64 bits", "got 18446744073709551616"),
    "state as a NumPy array": (adam(bias_first=torch.zeros(18).numpy()), "bias_first", "got ndarray"),
    "sgd with a state": ({"state": state("momentum")}, "'sgd'", "weight_first"),
    "adam without a state": ({"optimizer": OptimizerConfig(kind="adam")}, "'adam'", "weight_first absent"),
    "adam with the state of momentum": (
        {"optimizer": OptimizerConfig(kind="adam"), "state": state("momentum")},
        "'adam'",
        "weight_second absent",
    ),
    "momentum with the state of adam": (
        {"optimizer": OptimizerConfig(kind="momentum"), "state": state("adam")},
        "'momentum'",
        "weight_second",
    ),
    "label_adam with the state of adam": (
        {"optimizer": OptimizerConfig(kind="label_adam"), "state": state("adam")},
        "'label_adam'",
        "weight_first",
    ),
    "label_adam with a second moment for each connection": (
        {
            "optimizer": OptimizerConfig(kind="label_adam"),
            "state": OptimizerState(weight_second=torch.zeros(18, 4)),
        },
        "state.weight_second",
        "[label] = [18]",
        "got float32 [18, 4]",
    ),
    "state of too many labels": (
        adam(weight_first=torch.zeros(19, 4)),
        "state.weight_first",
        "[18, 4]",
        "got float32 [19, 4]",
    ),
    "state of bfloat16": (
        adam(weight_second=torch.zeros(18, 4, dtype=BFLOAT16)),
        "state.weight_second",
        "got bfloat16 [18, 4]",
    ),
    "strided state": (adam(weight_second=torch.zeros(4, 18).T), "state.weight_second", "got strides [1, 18]"),
    "state of the bias of another length": (
        adam(bias_second=torch.zeros(17)),
        "state.bias_second",
        "got float32 [17]",
    ),
    "positive_weight of another length": (
        {"positive_weight": torch.ones(17)},
        "positive_weight",
        "[label] = [18]",
        "got float32 [17]",
    ),
    "positive_weight of float64": (
        {"positive_weight": torch.ones(18, dtype=torch.float64)},
        "positive_weight",
        "got float64 [18]",
    ),
    "strided positive_weight": (
        {"positive_weight": torch.ones(36)[::2]},
        "positive_weight",
        "got strides [2]",
    ),
}


@pytest.mark.parametrize("case", STEP)
def test_settings_of_a_step_that_do_not_fit_are_refused_and_change_nothing(case: str) -> None:
    changes, *found = STEP[case]
    problem = small()
    before = problem.copy()
    refusal("fused_step", lambda: step(problem, **changes), *found)
    assert torch.equal(problem.weight, before.weight) and torch.equal(problem.bias, before.bias)


@pytest.mark.parametrize("k", [2.5, "2", None, 2**64])
def test_k_that_is_no_integer_is_refused(k: object) -> None:
    refusal("top_labels", lambda: top(small(), k), "k must be an integer", f"got {k!r}")


@pytest.mark.parametrize("k", [0, -1, 19, 2**40])
def test_k_out_of_range_is_refused(k: int) -> None:
    refusal("top_labels", lambda: top(small(), k), "k must lie in [1, label] = [1, 18]", f"got {k}")


PRUNE = {
    "fraction below 0": ({"fraction": -0.1}, "fraction must lie in [0, 1]", "got -0.1"),
    "fraction above 1": ({"fraction": 1.001}, "fraction must lie in [0, 1]", "got 1.001"),
    "fraction that is no number": ({"fraction": math.nan}, "fraction must lie in [0, 1]", "got nan"),
    "both fraction and threshold": (
        {"threshold": 0.25},
        "exactly one of fraction and threshold",
        "0.5",
        "0.25",
    ),
    "neither fraction nor threshold": ({"fraction": None}, "exactly one of fraction and threshold", "None"),
    "threshold below 0": ({"fraction": None, "threshold": -1.0}, "threshold", "at least 0", "got -1.0"),
    "threshold that is no number": ({"fraction": None, "threshold": math.nan}, "threshold", "got nan"),
    "new_value_bound that is no number": ({"new_value_bound": math.nan}, "must be finite", "got nan"),
    "infinite new_value_bound": ({"new_value_bound": math.inf}, "must be finite", "got inf"),
    "step below 0": ({"step": -1}, "step must be at least 0", "got -1"),
    "seed below 0": ({"seed": -1}, "seed must be at least 0", "got -1"),
    "fraction as a string": ({"fraction": "a"}, "fraction must be a number", "got 'a'"),
    "seed as a float": ({"seed": 1.5}, "seed must be an integer", "got 1.5"),
    "unknown new_value": ({"new_value": "one"}, "zero, random, keep", "got 'one'"),
    "unknown scope": ({"scope": "label"}, "layer, group", "got 'label'"),
    "three states": ({"states": [torch.zeros(18, 4)] * 3}, "states", "at most two", "got 3"),
    "state of another shape": ({"states": [torch.zeros(18, 5)]}, "state", "[18, 4]", "got float32 [18, 5]"),
    "second state of float64": (
        {"states": [torch.zeros(18, 4), torch.zeros(18, 4, dtype=torch.float64)]},
        "state 1",
        "got float64 [18, 4]",
    ),
    "strided state": ({"states": [torch.zeros(4, 18).T]}, "state", "got strides [1, 18]"),
    "fewer inputs than indices reach": ({"input": 9}, "indices", "[0, 9)"),
}


@pytest.mark.parametrize("case", PRUNE)
def test_settings_of_a_redistribution_that_do_not_fit_are_refused_and_change_nothing(case: str) -> None:
    changes, *found = PRUNE[case]
    problem = small()
    before = problem.copy()
    refusal("redistribute", lambda: prune(problem, **changes), *found)
    assert torch.equal(problem.weight, before.weight) and torch.equal(problem.indices, before.indices)


def test_a_redistribution_of_more_connections_than_inputs_is_refused() -> None:
    problem = replace(small(), indices=torch.zeros(18, 4, dtype=INT32))
    refusal("redistribute", lambda: prune(problem, input=3), "fan_in must be at most input = 3", "got 4")


@pytest.mark.parametrize(("dtype", "most"), [(UINT16, 65_536), (INT32, 2**31 - 1)])
def test_a_redistribution_over_more_inputs_than_the_indices_can_name_is_refused(
    dtype: torch.dtype, most: int
) -> None:
    """The indices once wrapped around: repeats, or a segmentation fault in the next step."""
    problem = replace(small(), indices=small().indices.to(dtype))
    prune(problem, input=most)
    before = problem.indices.clone()
    for input in (most + 1, 2**40):
        refusal("redistribute", lambda: prune(problem, input=input), f"input must be at most {most}")  # noqa: B023
    assert torch.equal(problem.indices, before)


def incoming(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (incoming(17, 5), "got float32 [17, 5]"),
        (incoming(18, 5).double(), "got float64 [18, 5]"),
        (incoming(18), "got [18]"),
    ],
    ids=["too few labels", "float64", "one axis"],
)
def test_an_incoming_gradient_that_does_not_fit_the_layer_is_refused(
    gradient: torch.Tensor, found: str
) -> None:
    problem = small()
    op = torch.ops.xmlc.sparse_linear_feature_gradient
    refusal(
        "sparse_linear", lambda: op(gradient, problem.weight, problem.indices, 1, 10), "logit_gradient", found
    )


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (incoming(18, 4), "got float32 [18, 4]"),
        (incoming(18, 5).half(), "got float16 [18, 5]"),
        (incoming(5), "got [5]"),
    ],
    ids=["too few instances", "float16", "one axis"],
)
def test_an_incoming_gradient_that_does_not_fit_the_batch_is_refused(
    gradient: torch.Tensor, found: str
) -> None:
    problem = small()
    op = torch.ops.xmlc.sparse_linear_weight_gradient
    refusal(
        "sparse_linear", lambda: op(gradient, problem.features, problem.indices, 1), "logit_gradient", found
    )


def test_the_sizes_beside_the_wrong_ones_are_accepted() -> None:
    for problem in (small(), small(16)):
        for call in OPS.values():
            call(problem.copy())
    top(small(), k=18)
    prune(small(), fraction=1.0)
    prune(small(), fraction=0.0)


def test_messages_say_what_must_hold_what_was_found_and_what_to_do() -> None:
    problem = small()
    with pytest.raises(NativeError) as error:
        sparse_linear(problem.features, problem.weight, problem.indices.T.contiguous().long(), problem.bias)
    assert str(error.value) == (
        "sparse_linear: indices must be uint16 or int32 [group, fan_in] = [18, 4], got int64 [4, 18]"
    )
    with pytest.raises(NativeError, match=re.escape("call .contiguous() first")):
        sparse_linear(transposed(problem.features), problem.weight, problem.indices, problem.bias)
    with pytest.raises(NativeError, match=re.escape("make it by OptimizerState.zeros")):
        step(problem, optimizer=OptimizerConfig(kind="adam"))


@pytest.mark.parametrize(
    ("name", "pairs", "found"),
    [
        ("pair_label", (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=INT32)), "got int64 [3]"),
        ("pair_instance", (torch.zeros(3, dtype=INT32), torch.zeros(2, dtype=INT32)), "got int32 [2]"),
    ],
)
def test_the_registered_step_checks_its_pairs(
    name: str, pairs: tuple[torch.Tensor, torch.Tensor], found: str
) -> None:
    features, weight, indices, bias, _ = small().layer
    of_loss = ("bce", 1.0, False, 0.0)
    of_optimizer = ("sgd", 0.1, 0.0, 0.9, 0.9, 0.999, 1e-8, 1, 0)
    settings = (None, None, None, None, None, 1, *of_loss, *of_optimizer)
    call = torch.ops.xmlc.fused_step
    refusal("fused_step", lambda: call(features, *pairs, weight, indices, bias, *settings), name, found)


@pytest.mark.parametrize(
    ("labels", "instances", "found"),
    [
        ([0, 18], [0, 1], "pair_label must lie in [0, 18), got values from 0 to 18"),
        ([-1, 1], [0, 1], "pair_label must lie in [0, 18), got values from -1 to 1"),
        ([0, 1], [0, 5], "pair_instance must lie in [0, 5), got values from 0 to 5"),
        ([0, 1], [-1, 0], "pair_instance must lie in [0, 5)"),
        ([2, 1], [0, 1], "pairs must rise by label"),
        ([1, 1], [0, 0], "make them by pairs_by_label"),
        ([1, 1], [2, 1], "pairs must rise by label"),
    ],
)
def test_the_registered_step_checks_range_and_order_of_its_pairs(
    labels: list[int], instances: list[int], found: str
) -> None:
    """The native code once took them on trust, and wrote out of its arrays."""
    features, weight, indices, bias, _ = small().layer
    pairs = (torch.tensor(labels, dtype=INT32), torch.tensor(instances, dtype=INT32))
    of_loss, of_optimizer = ("bce", 1.0, False, 0.0), ("sgd", 0.1, 0.0, 0.9, 0.9, 0.999, 1e-8, 1, 0)
    settings = (None, None, None, None, None, 1, *of_loss, *of_optimizer)
    call = torch.ops.xmlc.fused_step
    refusal("fused_step", lambda: call(features, *pairs, weight, indices, bias, *settings), found)
