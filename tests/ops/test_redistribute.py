"""redistribute: its invariants for any layer, the choice of what goes, and the draw of what comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import BFLOAT16, FLOAT32, INT32, UINT16
from torch import Tensor

from xmlc import native
from xmlc.ops import redistribute

Z_BOUND = 5.5
"""Standard deviations that a fair draw exceeds once in 26 million tests; seeds fix the draws."""


@dataclass(frozen=True)
class Connections:
    """What redistribute changes. The states are nowhere 0, so that their zeros show what was replaced."""

    weight: Tensor  # [label, fan_in]
    indices: Tensor  # [group, fan_in]
    input: int
    group_size: int = 1
    states: list[Tensor] = field(default_factory=list)  # [label, fan_in] each

    def copy(self) -> Connections:
        return replace(
            self,
            weight=self.weight.clone(),
            indices=self.indices.clone(),
            states=[state.clone() for state in self.states],
        )

    def group_of(self) -> Tensor:
        """Return the group of every label, [label]."""
        return torch.arange(self.weight.shape[0]) // self.group_size

    def inputs(self) -> np.ndarray:
        """Return the indices as int64 [group, fan_in]."""
        return self.indices.numpy().astype(np.int64)

    def scores(self) -> Tensor:
        """Return mean |weight| over the labels of each group, float64 [group, fan_in]."""
        group, fan_in = self.indices.shape
        sums = torch.zeros(group, fan_in, dtype=torch.float64).index_add(
            0, self.group_of(), self.weight.double().abs()
        )
        return sums / torch.bincount(self.group_of(), minlength=group)[:, None]


def connections(
    label: int,
    fan_in: int,
    input: int,
    group_size: int = 1,
    weight: float | None = None,
    weight_dtype: torch.dtype = FLOAT32,
    index_dtype: torch.dtype = INT32,
    states: int = 1,
    seed: int = 0,
) -> Connections:
    """Draw connections; all weights equal where one is given, else normal."""
    generator = np.random.default_rng([seed, label, fan_in])
    group = -(-label // group_size)
    weights = (
        generator.standard_normal((label, fan_in)) if weight is None else np.full((label, fan_in), weight)
    )
    return Connections(
        weight=torch.from_numpy(weights).to(weight_dtype),
        indices=oracles.random_indices(generator, group, fan_in, input, index_dtype),
        input=input,
        group_size=group_size,
        states=[torch.from_numpy(generator.random((label, fan_in), np.float32)) + 1.0 for _ in range(states)],
    )


def identity(group: int, fan_in: int, input: int, **options) -> Connections:
    """Return groups that all have the inputs 0, 1, …, fan_in - 1 in this order."""
    rows = torch.arange(fan_in, dtype=INT32).repeat(group, 1)
    return replace(connections(group, fan_in, input, **options), indices=rows)


def run(before: Connections, **arguments) -> tuple[Connections, int]:
    """Return the connections after a redistribution, and how many it says it replaced."""
    after = before.copy()
    count = redistribute(
        after.weight,
        after.indices,
        after.input,
        states=after.states,
        group_size=after.group_size,
        **arguments,
    )
    return after, count


def replaced_in(before: Connections, after: Connections) -> Tensor:
    """Return which connections were replaced, [group, fan_in], by the first state's zeros.

    A connection of a group must be replaced for all its labels or for none.
    """
    by_label = after.states[0] == 0.0
    group = before.indices.shape[0]
    count = torch.zeros(group, by_label.shape[1], dtype=torch.int64).index_add(
        0, before.group_of(), by_label.to(torch.int64)
    )
    labels = torch.bincount(before.group_of(), minlength=group)[:, None]
    assert bool(((count == 0) | (count == labels)).all())
    return count > 0


def asked(before: Connections, fraction: float) -> int:
    return math.floor(fraction * before.indices.numel() + 0.5)


def assert_invariants(
    before: Connections, after: Connections, count: int, new_value: str, bound: float
) -> Tensor:
    """Check what holds after any redistribution; return which connections were replaced."""
    group, fan_in = before.indices.shape
    rows = after.inputs()
    assert after.indices.dtype == before.indices.dtype and rows.shape == (group, fan_in)
    assert rows.min() >= 0 and rows.max() < before.input
    assert all(len(set(row)) == fan_in for row in rows.tolist())

    replaced = replaced_in(before, after)
    assert type(count) is int and count == int(replaced.sum())
    kept = ~replaced
    assert oracles.bits(after.indices[kept]) == oracles.bits(before.indices[kept])
    by_label = replaced[before.group_of()]
    for old, new in zip([before.weight, *before.states], [after.weight, *after.states], strict=True):
        assert oracles.bits(new[~by_label]) == oracles.bits(old[~by_label])
    for state in after.states:
        assert not state[by_label].any()

    new_weights = after.weight[by_label]
    if new_value == "zero":
        assert not new_weights.any()
    elif new_value == "keep":
        assert oracles.bits(after.weight) == oracles.bits(before.weight)
    else:
        assert bool((new_weights.abs() <= bound).all())
    return replaced


def assert_lowest(scores: Tensor, replaced: Tensor) -> None:
    """Require no kept score to be below a replaced one, up to the rounding of a float32 mean of 64 labels."""
    if bool(replaced.any()) and not bool(replaced.all()):
        assert scores[replaced].max() <= scores[~replaced].min() * (1.0 + oracles.gamma(66) * 2)


@st.composite
def layers(draw: st.DrawFn) -> Connections:
    """Layers of any form; weights are multiples of 1/8 with many ties, or any numbers."""
    group_size = draw(st.sampled_from([1, 16, 32, 64]))
    label = draw(st.integers(1, 40 if group_size == 1 else 3 * group_size))
    fan_in = draw(st.integers(1, 20))
    input = draw(st.one_of(st.just(fan_in), st.integers(fan_in, fan_in + 5), st.integers(fan_in, 70_000)))
    index_dtype = draw(st.sampled_from([UINT16, INT32])) if input <= 65_536 else INT32
    made = connections(
        label,
        fan_in,
        input,
        group_size,
        weight_dtype=draw(st.sampled_from([FLOAT32, BFLOAT16])),
        index_dtype=index_dtype,
        states=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    levels = draw(st.sampled_from([None, 1, 2, 20]))
    if levels is not None:
        made.weight[:] = (made.weight * 100).fmod(levels).round() / 8
    return made


any_layer = settings(max_examples=150, derandomize=True)
fractions = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(0.0, 1.0))
new_values = st.sampled_from(["zero", "random", "keep"])
steps = st.integers(0, 2**40)
seeds = st.integers(0, 2**63 - 1)


@any_layer
@given(layers(), fractions, st.sampled_from(["layer", "group"]), new_values, steps, seeds)
def test_a_fraction_replaces_exactly_that_many_of_the_lowest_scores(
    before: Connections, fraction: float, scope: str, new_value: str, step: int, seed: int
) -> None:
    after, count = run(
        before,
        fraction=fraction,
        scope=scope,
        new_value=new_value,
        new_value_bound=0.25,
        step=step,
        seed=seed,
    )
    replaced = assert_invariants(before, after, count, new_value, 0.25)
    assert count == asked(before, fraction)
    scores = before.scores()
    if scope == "layer":
        assert_lowest(scores, replaced)
    else:
        share = count / len(replaced)
        for group_scores, group_replaced in zip(scores, replaced, strict=True):
            assert int(group_replaced.sum()) in (math.floor(share), math.ceil(share))
            assert_lowest(group_scores, group_replaced)


@any_layer
@given(
    layers(),
    st.one_of(st.floats(0.0, 3.0), st.integers(0, 8).map(lambda eighths: eighths / 8)),
    new_values,
    seeds,
)
def test_a_threshold_replaces_exactly_the_scores_below_it(
    before: Connections, threshold: float, new_value: str, seed: int
) -> None:
    after, count = run(before, threshold=threshold, new_value=new_value, new_value_bound=0.25, seed=seed)
    replaced = assert_invariants(before, after, count, new_value, 0.25)
    scores = before.scores()
    near = (scores - threshold).abs() <= 2 * oracles.gamma(66) * scores  # a float32 mean may fall either way
    if before.group_size == 1:
        near &= scores != threshold  # no mean: exactly at the threshold stays
    assert torch.equal(replaced[~near], (scores < threshold)[~near])


@any_layer
@given(layers(), fractions, steps, seeds)
def test_states_are_optional_and_change_nothing_else(
    before: Connections, fraction: float, step: int, seed: int
) -> None:
    arguments = {
        "fraction": fraction,
        "new_value": "random",
        "new_value_bound": 0.5,
        "step": step,
        "seed": seed,
    }
    with_states, count = run(before, **arguments)
    without_states, same_count = run(replace(before, states=[]), **arguments)
    assert count == same_count
    assert oracles.bits(with_states.weight) == oracles.bits(without_states.weight)
    assert oracles.bits(with_states.indices) == oracles.bits(without_states.indices)


@any_layer
@given(layers(), fractions, st.sampled_from(["layer", "group"]), steps, seeds)
def test_the_same_arguments_give_the_same_bits_on_every_instruction_set(
    before: Connections, fraction: float, scope: str, step: int, seed: int
) -> None:
    arguments = {"new_value": "random", "new_value_bound": 0.5, "step": step, "seed": seed}
    outcomes = set()
    for name in native.cpu.available_isas():
        with oracles.isa(name):
            after, count = run(before, fraction=fraction, scope=scope, **arguments)
        outcomes.add((count, *map(oracles.bits, (after.weight, after.indices, *after.states))))
    assert len(outcomes) == 1


def test_weak_connections_of_a_hand_made_layer_are_replaced(backend: str) -> None:
    before = Connections(
        weight=torch.tensor([[3.0, -0.25, 1.0], [-0.5, 2.0, -4.0]]),
        indices=torch.tensor([[0, 1, 2], [3, 1, 0]], dtype=INT32),
        input=4,
        states=[torch.ones(2, 3)],
    )
    after, count = run(before, fraction=1 / 3)
    assert count == 2
    assert after.weight.tolist() == [[3.0, 0.0, 1.0], [0.0, 2.0, -4.0]]
    assert after.states[0].tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    rows = after.inputs().tolist()
    assert rows[0][0] == 0 and rows[0][2] == 2 and rows[0][1] in (1, 3)
    assert rows[1][1:] == [1, 0] and rows[1][0] in (2, 3)


def test_the_score_of_a_group_is_the_mean_over_its_own_labels(backend: str) -> None:
    # 17 labels: in the first group the means are 1 and 2, in the second, of one label, 1.5 and 0.5.
    weight = torch.cat([torch.tensor([[2.0, 4.0], [0.0, 0.0]]).repeat(8, 1), torch.tensor([[-1.5, 0.5]])])
    before = Connections(
        weight=weight,
        indices=torch.tensor([[0, 1], [0, 1]], dtype=INT32),
        input=9,
        group_size=16,
        states=[torch.ones(17, 2)],
    )
    for arguments, expected in (
        ({"fraction": 0.25}, [[False, False], [False, True]]),
        ({"fraction": 0.5}, [[True, False], [False, True]]),
        ({"fraction": 0.75}, [[True, False], [True, True]]),
        ({"threshold": 1.0}, [[False, False], [False, True]]),
        ({"threshold": 1.25}, [[True, False], [False, True]]),
        ({"fraction": 0.5, "scope": "group"}, [[True, False], [False, True]]),
    ):
        after, _ = run(before, **arguments)
        assert replaced_in(before, after).tolist() == expected, arguments


def test_a_score_equal_to_the_threshold_stays(backend: str) -> None:
    before = connections(100, 8, 50, weight=0.5)
    assert run(before, threshold=0.5)[1] == 0
    assert run(before, threshold=math.nextafter(0.5, 0.0))[1] == 0
    assert run(before, threshold=0.5 + 2.0**-20)[1] == 800


def test_a_fraction_of_zero_and_a_threshold_of_zero_change_nothing(backend: str) -> None:
    before = connections(100, 8, 50, weight=0.0)
    for arguments in ({"fraction": 0.0}, {"threshold": 0.0}, {"fraction": 0.0, "scope": "group"}):
        after, count = run(before, **arguments)
        assert count == 0
        for old, new in zip(
            [before.weight, before.indices, *before.states],
            [after.weight, after.indices, *after.states],
            strict=True,
        ):
            assert oracles.bits(old) == oracles.bits(new)


@pytest.mark.parametrize("scope", ["layer", "group"])
def test_halves_round_up(backend: str, scope: str) -> None:
    before = connections(10, 5, 40)
    for fraction, expected in ((0.01, 1), (0.009, 0), (0.03, 2), (0.99, 50), (0.98, 49), (0.5, 25)):
        assert run(before, fraction=fraction, scope=scope)[1] == expected


def test_an_infinite_threshold_replaces_everything(backend: str) -> None:
    before = connections(33, 8, 50)
    after, count = run(before, threshold=math.inf)
    assert count == 33 * 8
    assert_invariants(before, after, count, "zero", 0.0)


@pytest.mark.parametrize("input", [65_536, 70_000])
def test_the_last_of_many_inputs_can_come(backend: str, input: int) -> None:
    dtype = UINT16 if input == 65_536 else INT32
    before = connections(20_000, 32, input, index_dtype=dtype, weight=0.0, states=0)
    after, _ = run(before, fraction=1.0, seed=3)
    seen = np.bincount(after.inputs().flatten(), minlength=input)
    assert len(seen) == input
    assert seen[-1] > 0 and seen[0] > 0
    assert_uniform(seen)


def assert_uniform(counts: np.ndarray) -> None:
    """Bound chi-square of counts that should be equal: mean and variance of its distribution, then normal."""
    expected = counts.sum() / counts.size
    assert expected >= 5
    freedom = counts.size - 1
    z = (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5
    assert z < Z_BOUND, z


@pytest.mark.parametrize(("fan_in", "input"), [(4, 20), (8, 9), (16, 17), (31, 70)])
@pytest.mark.parametrize("index_dtype", [UINT16, INT32], ids=["uint16", "int32"])
def test_replacing_everything_gives_uniform_inputs_at_every_place(
    backend: str, fan_in: int, input: int, index_dtype: torch.dtype
) -> None:
    before = identity(8000, fan_in, input)
    before = replace(before, indices=torch.from_numpy(before.inputs().astype(np.int32)).to(index_dtype))
    after, _ = run(before, fraction=1.0, seed=7)
    rows = after.inputs()
    assert all(len(set(row)) == fan_in for row in rows.tolist())
    assert_uniform(np.bincount(rows.flatten(), minlength=input))
    for place in range(fan_in):
        assert_uniform(np.bincount(rows[:, place], minlength=input))


def test_pairs_of_places_get_uniform_pairs_of_inputs(backend: str) -> None:
    after, _ = run(identity(20_000, 4, 10), fraction=1.0, seed=1)
    rows = after.inputs()
    for first, second in ((0, 1), (1, 2), (0, 3)):
        counts = np.bincount(10 * rows[:, first] + rows[:, second], minlength=100).reshape(10, 10)
        assert_uniform(counts[~np.eye(10, dtype=bool)])


def test_inputs_that_come_are_uniform_among_those_that_the_group_did_not_keep(backend: str) -> None:
    before = identity(20_000, 6, 15, weight=1.0)
    before.weight[:, [1, 4]] = 0.0  # replaced in every group
    after, count = run(before, fraction=1 / 3, seed=11)
    assert count == 40_000
    rows = after.inputs()
    free = [1, 4, *range(6, 15)]
    for place in (1, 4):
        counts = np.bincount(rows[:, place], minlength=15)
        assert counts.sum() == counts[free].sum()
        assert_uniform(counts[free])


@pytest.mark.parametrize("scope", ["layer", "group"])
@pytest.mark.parametrize(("group_size", "weight_dtype"), [(1, FLOAT32), (1, BFLOAT16), (16, FLOAT32)])
def test_ties_are_broken_all_over_the_layer(
    backend: str, scope: str, group_size: int, weight_dtype: torch.dtype
) -> None:
    group, fan_in = 4000, 10
    before = connections(group * group_size, fan_in, 100, group_size, weight=0.75, weight_dtype=weight_dtype)
    after, count = run(before, fraction=0.037, scope=scope, seed=2)
    assert count == 1480
    replaced = replaced_in(before, after).numpy()
    assert_uniform(replaced.sum(0))  # by place
    assert_uniform(replaced.reshape(40, -1).sum(1))  # by neighbourhood of groups
    assert_uniform(replaced.reshape(-1, 8, fan_in).sum((0, 2)))  # by the lowest bits of the group
    if scope == "layer":
        in_group = np.bincount(replaced.sum(1), minlength=4)
        binomial = [group * math.comb(10, n) * 0.037**n * 0.963 ** (10 - n) for n in range(4)]
        assert abs(in_group[:4] - binomial).max() < Z_BOUND * max(binomial) ** 0.5
    else:
        assert replaced.sum(1).max() == 1


def test_another_step_or_seed_breaks_ties_and_draws_inputs_otherwise(backend: str) -> None:
    before = connections(1000, 8, 500, weight=0.75)
    outcomes = []
    for arguments in ({"step": 0}, {"step": 1}, {"seed": 1}, {"step": 2**32}, {"seed": 2**40}):
        after, _ = run(before, fraction=0.25, **arguments)
        outcomes.append((replaced_in(before, after), after.inputs()))
    for i, (replaced, inputs) in enumerate(outcomes):
        for other_replaced, other_inputs in outcomes[:i]:
            # Independent choices of a quarter agree in 1/16 + 9/16 of the places, here of 8000.
            share_alike = float((replaced == other_replaced).double().mean())
            assert abs(share_alike - 10 / 16) < Z_BOUND * 0.5 / 8000**0.5
            both = (replaced & other_replaced).numpy()
            assert (inputs == other_inputs)[both].mean() < 0.05


def test_the_draws_of_neighbouring_groups_and_steps_are_unrelated(backend: str) -> None:
    before = identity(2000, 8, 64)
    drawn = np.stack([run(before, fraction=1.0, step=step)[0].inputs() for step in range(4)]).astype(float)
    for first, second in (
        (drawn[1:], drawn[:-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[1:, :-1], drawn[:-1, 1:]),
        (drawn[:, 16:], drawn[:, :-16]),
    ):
        z = np.corrcoef(first.flatten(), second.flatten())[0, 1] * first.size**0.5
        assert abs(z) < Z_BOUND


@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group_size", [1, 16])
def test_random_new_values_are_uniform_in_their_bound_and_each_label_s_own(
    backend: str, weight_dtype: torch.dtype, group_size: int
) -> None:
    bound = 0.25
    before = connections(4096, 8, 50, group_size, weight_dtype=weight_dtype)
    after, _ = run(before, fraction=1.0, new_value="random", new_value_bound=bound, seed=5)
    drawn = after.weight.double()
    assert float(drawn.min()) >= -bound
    assert float(drawn.max()) < bound if weight_dtype == FLOAT32 else float(drawn.max()) <= bound
    assert_uniform(np.histogram(drawn.numpy(), bins=64, range=(-bound, bound))[0])
    z = float(drawn.mean()) / (bound / 3**0.5 / drawn.numel() ** 0.5)
    assert abs(z) < Z_BOUND
    for first, second in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[16:], drawn[:-16])):
        correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(float(correlation)) * first.numel() ** 0.5 < Z_BOUND
    if weight_dtype == FLOAT32:
        assert len(drawn.unique()) > 0.99 * drawn.numel()


def test_random_new_values_differ_from_step_to_step(backend: str) -> None:
    before = connections(100, 8, 50)
    first, second = (
        run(before, fraction=1.0, new_value="random", new_value_bound=1.0, step=step)[0].weight
        for step in (1, 2)
    )
    assert float((first == second).double().mean()) < 0.01


SPECIAL: dict[str, Callable[[], Connections]] = {
    "every input in use": lambda: connections(70, 12, 12, 16),
    "one connection": lambda: connections(1, 1, 1),
    "one connection of many inputs": lambda: connections(1, 1, 65_536, index_dtype=UINT16),
    "one input free": lambda: connections(40, 12, 13),
    "bfloat16": lambda: connections(40, 12, 30, weight_dtype=BFLOAT16),
    "a last group of one label": lambda: connections(65, 12, 30, 64),
    "fewer labels than a group": lambda: connections(3, 12, 30, 32),
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("scope", ["layer", "group"])
def test_special_layers_keep_the_invariants_over_many_redistributions(
    backend: str, special: str, fraction: float, scope: str
) -> None:
    before = SPECIAL[special]()
    for step in range(20):
        after, count = run(
            before, fraction=fraction, scope=scope, new_value="random", new_value_bound=0.5, step=step
        )
        assert_invariants(before, after, count, "random", 0.5)
        assert count == asked(before, fraction)
        before = replace(after, states=[torch.ones_like(state) for state in after.states])


def test_extreme_scores_are_ranked_as_numbers(backend: str) -> None:
    values = [0.0, 2.0**-149, 2.0**-126, 1e-30, 1.0, 1.0 + 2**-23, 3e38, math.inf]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    weight = (torch.tensor(values) * signs)[order][:, None]
    before = Connections(weight, torch.zeros(8, 1, dtype=INT32), 5, states=[torch.ones(8, 1)])
    for count in range(9):
        after, _ = run(before, fraction=count / 8)
        assert replaced_in(before, after)[:, 0].tolist() == (order < count).tolist()


def test_nan_scores_are_harmless_to_the_indices(backend: str) -> None:
    before = connections(40, 12, 30)
    before.weight[3, :] = math.nan
    for arguments in (
        {"fraction": 0.5},
        {"fraction": 1.0},
        {"threshold": 0.5},
        {"fraction": 0.5, "scope": "group"},
    ):
        after, count = run(before, new_value="keep", **arguments)
        assert_invariants(before, after, count, "keep", 0.0)
        if "fraction" in arguments:
            assert count == asked(before, arguments["fraction"])


def test_redistribution_gives_its_tensors_a_new_version(backend: str) -> None:
    before = connections(40, 12, 30)
    after = before.copy()
    changed = [after.weight, after.indices, *after.states]
    old = [value._version for value in changed]
    redistribute(after.weight, after.indices, 30, fraction=0.5, states=after.states)
    assert all(value._version > version for value, version in zip(changed, old, strict=True))
