"""The budget: what is shrunk, in which order, and what is said where nothing fits."""

from __future__ import annotations

import re

import numpy as np
import pytest

from xmlc.config import Config, load_config
from xmlc.errors import ConfigError
from xmlc.memory.budget import BudgetError, fit, needed_bytes, parse_bytes
from xmlc.memory.exhausted import Facts, _advice
from xmlc.memory.plan import plan
from xmlc.memory.terms import Batches
from xmlc.nn import Problem

PROBLEM = Problem(True, 256, 200_000, 100_000, 0.55, 1.5, np.empty(0, np.int64))
BATCHES = Batches(1000, 256.0)


def config(*overrides: str) -> Config:
    return load_config(None, ["training.threads=1", *overrides])


def needed(settings: Config) -> int:
    return needed_bytes(plan(settings, PROBLEM, BATCHES))


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("400MB", 400_000_000), ("2.5g", 5 << 29), (" 7 kib ", 7168), ("12", 12), ("3B", 3)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1GB", "1e400"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a size must be a number with a unit such as 4GiB"):
        parse_bytes(text)


def test_what_fits_stays_as_it_is() -> None:
    settings = config()
    assert fit(settings, PROBLEM, BATCHES, needed(settings)).changes == ()


SMALL_BLOCKS = ("training.evaluation_batch=16", "training.block_bytes=1048576")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Ranking binds: half as many instances at a time.
        (("model.width=16384", "training.batch_size=16"), "training.evaluation_batch = 128 (was 256)"),
        # The gradient of the penultimate layer binds.
        (
            ("model.width=16384", "training.batch_size=16", "training.evaluation_batch=16"),
            "training.block_bytes = 8388608 (was 16777216)",
        ),
        # So do logits of the dense output.
        (
            ("model.output=bottleneck", "training.evaluation_batch=16"),
            "training.block_bytes = 8388608 (was 16777216)",
        ),
    ],
)
def test_blocks_that_cost_no_accuracy_go_first(overrides: tuple[str, ...], expected: str) -> None:
    settings = config(*overrides)
    [change] = fit(settings, PROBLEM, BATCHES, needed(settings) - 1).changes
    assert str(change) == expected


def test_precision_goes_next() -> None:
    settings = config(*SMALL_BLOCKS)
    [change] = fit(settings, PROBLEM, BATCHES, needed(settings) - 1).changes
    assert str(change) == "model.weight_dtype = bfloat16 (was float32)"


def test_the_output_layer_s_state_goes_next_as_far_as_it_must() -> None:
    def with_state(dtype: str) -> Config:
        return config("model.weight_dtype=bfloat16", f"output_optimizer.state_dtype={dtype}")

    settings = with_state("float32")
    for larger, smaller in (("float32", "bfloat16"), ("bfloat16", "float8_e4m3fn")):
        [change] = fit(settings, PROBLEM, BATCHES, needed(with_state(larger)) - 1).changes
        assert str(change) == f"output_optimizer.state_dtype = {smaller} (was float32)"
    [change] = fit(settings, PROBLEM, BATCHES, needed(with_state("float8_e4m3fn")) - 1).changes
    assert str(change) == "output_optimizer.kind = label_adam (was adam)"


def test_float8_comes_after_all_that_costs_no_accuracy() -> None:
    smallest = config(
        "model.weight_dtype=bfloat16",
        "output_optimizer.kind=sgd",
        "dense_optimizer.kind=sgd",
        "training.batch_size=16",
        *SMALL_BLOCKS,
    )
    [change] = fit(smallest, PROBLEM, BATCHES, needed(smallest) - 1).changes
    assert str(change) == "model.weight_dtype = float8_e4m3fn (was bfloat16)"
    label_adam = config("model.weight_dtype=bfloat16", "output_optimizer.kind=label_adam")
    assert fit(config(), PROBLEM, BATCHES, needed(label_adam)).config.model.weight_dtype == "bfloat16"


def test_every_budget_between_is_kept_by_the_settings_found() -> None:
    settings = config("model.width=16384")
    most = needed(settings)
    smallest = int(re.findall(r"at least ([0-9.]+) MiB", _refusal(settings))[0].split(".")[0]) + 1
    for available in np.linspace(smallest << 20, most, 12).astype(int).tolist():
        fitting = fit(settings, PROBLEM, BATCHES, available)
        assert needed_bytes(fitting.plan) <= available
        assert fitting.plan == plan(fitting.config, PROBLEM, BATCHES)


def test_a_batch_that_was_shrunk_in_vain_goes_back() -> None:
    settings = config("model.width=16384", "model.weight_dtype=bfloat16", "output_optimizer.kind=sgd")
    plain = config(
        "model.width=16384",
        "model.weight_dtype=bfloat16",
        "output_optimizer.kind=sgd",
        "dense_optimizer.kind=sgd",
    )
    [change] = fit(settings, PROBLEM, BATCHES, needed(plain)).changes
    assert change.key == "dense_optimizer.kind"


def _refusal(settings: Config) -> str:
    with pytest.raises(BudgetError) as error:
        fit(settings, PROBLEM, BATCHES, 1 << 20)
    return str(error.value)


def test_the_refusal_names_what_would_do_and_what_takes_the_most() -> None:
    message = _refusal(config())
    found = re.search(r"at least ([0-9.]+) MiB .* found 1.0 MiB; the most is (.+) with", message)
    assert found is not None, message
    smallest = int((float(found[1]) + 0.1) * 2**20)
    assert fit(config(), PROBLEM, BATCHES, smallest).changes


def test_the_refusal_names_the_whole_budget_with_what_the_process_has_already() -> None:
    with pytest.raises(BudgetError) as error:
        fit(config(), PROBLEM, BATCHES, 1 << 20, 100 << 20)
    found = re.search(r"at least ([0-9.]+) MiB .* raise the budget to ([0-9.]+) MiB", str(error.value))
    assert found is not None
    assert float(found[2]) - float(found[1]) == pytest.approx(100.0, abs=0.11)
    assert "found 1.0 MiB beside the 100.0 MiB that the process has already" in str(error.value)
    with pytest.raises(BudgetError, match=r"found 0\.0 MiB beside the 100\.0 MiB"):
        fit(config(), PROBLEM, BATCHES, -(1 << 20), 100 << 20)


def test_the_refusal_names_the_disk_where_the_layer_may_lie_there() -> None:
    found = re.search(
        r"or set training.storage = disk .slower., which would need ([0-9.]+) MiB", _refusal(config())
    )
    assert found is not None
    smallest = int((float(found[1]) + 0.1) * 2**20)
    assert fit(config("training.storage=disk"), PROBLEM, BATCHES, smallest).changes
    with pytest.raises(BudgetError):
        fit(config(), PROBLEM, BATCHES, smallest)
    for refused in ("training.storage=disk", "model.output=dense", "training.device=cuda"):
        assert "training.storage" not in _refusal(config(refused))


def test_the_refusal_does_not_name_the_disk_in_vain() -> None:
    """Of so few labels, what is asked for most lies in no file: the features of a dense layer."""
    problem = Problem(False, 300_000, 16, 1_000, 0.55, 1.5, np.empty(0, np.int64))
    with pytest.raises(BudgetError) as error:
        fit(config("model.fan_in=1"), problem, Batches(1000, 256.0), 1 << 20)
    assert "lower hidden or the features" in str(error.value)
    assert "training.storage" not in str(error.value)


@pytest.mark.parametrize(
    ("limited", "advice"),
    [
        (True, r"address space, of which this process has [0-9.]+ MiB untouched .*: raise the"),
        (False, "close other programs"),
    ],
)
def test_where_the_plan_fits_the_advice_is_about_what_it_does_not_count(limited: bool, advice: str) -> None:
    facts = Facts(config(), PROBLEM, BATCHES, 0)
    assert re.search(advice, _advice(facts, 2 * needed(config()), limited))
