"""Chooses settings that fit a budget of memory, or names the smallest budget that some would fit.

A budget is of the process's memory, or, where the run is on a CUDA device, of the device's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from xmlc.config import Config, build_config
from xmlc.errors import ConfigError
from xmlc.memory.device import device_plan
from xmlc.memory.plan import plan
from xmlc.memory.tables import mebibytes
from xmlc.memory.terms import Batches, Plan
from xmlc.nn.model import Problem

MARGIN_SHARE, MARGIN_BYTES = 0.05, 8 << 20
"""What a plan may be wrong by; `xmlc profile --check` fails beyond it."""
SMALLEST_BATCH, SMALLEST_WIDTH, SMALLEST_FAN_IN = 16, 2048, 8
SMALLEST_MINI_BATCH = 4
SMALLEST_BLOCK_BYTES = 1 << 20
SEGMENT_BYTES = 22 << 20
"""What torch's allocator may have of a device beyond what it hands out: it takes segments of 2 MiB for small
tensors and of 20 MiB for larger ones, and one of each may be hardly used."""

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True)
class Change:
    """A setting that differs from what was asked for."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.now} (was {self.before})"


@dataclass(frozen=True)
class Fit:
    """Settings that fit a budget."""

    config: Config
    plan: Plan
    changes: tuple[Change, ...]


class BudgetError(ConfigError):
    """No settings fit the budget."""


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``4GiB``, ``400MB`` or ``2.5G`` (GiB).

    Raises:
        ConfigError: It is none.
    """
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ConfigError(
            f"memory: a size must be a number with a unit such as 4GiB or 400MB, found {text!r}; give one"
        )
    return int(float(found[1]) * units[found[2].lower()])


def needed_bytes(planned: Plan) -> int:
    """Return the budget that a plan needs, with what it may be wrong by."""
    segments = SEGMENT_BYTES if planned.place == "device" else 0
    return int(planned.peak_bytes * (1.0 + MARGIN_SHARE)) + MARGIN_BYTES + segments


def limited_plan(config: Config, problem: Problem, batches: Batches) -> Plan:
    """Return the plan of what a budget limits: the process, or the device where the run is on one."""
    return (device_plan if config.training.device == "cuda" else plan)(config, problem, batches)


def fit(
    config: Config, problem: Problem, batches: Batches, available_bytes: int, taken_bytes: int = 0
) -> Fit:
    """Return the settings, changed as little as the bytes demand.

    They shrink in a fixed order, each as far as it goes before the next: the instances ranked at a time and
    the blocks of dense layers (a little slower); weights to bfloat16; the output layer's optimizer state to
    bfloat16, then float8; Adam's moments of the output layer to one value for each label; of two towers
    whose transformer is trained the mini-batch of gradient caching (slower); the batch (slower);
    the dense layers' Adam to SGD, which
    wants a learning rate of its own; weights to float8; width, then fan-in (less accurate). What then turns
    out not to have been needed goes back, the last first.

    ``taken_bytes`` is the share of the budget that is not available, because the process has it already.

    Raises:
        BudgetError: Even the last do not fit; the message names a budget that would do, and what takes most.
    """

    def fits(candidate: Config) -> bool:
        return needed_bytes(limited_plan(candidate, problem, batches)) <= available_bytes

    for candidate in _candidates(config):
        if fits(candidate):
            chosen = _grown(config, candidate, fits)
            return Fit(chosen, limited_plan(chosen, problem, batches), changes(config, chosen))
    planned = limited_plan(candidate, problem, batches)
    shrunk = ", ".join(str(change) for change in changes(config, candidate)) or "no setting left to shrink"
    beside = f" beside the {mebibytes(taken_bytes)} that the process has already" if taken_bytes else ""
    raise BudgetError(
        f"memory: the budget must leave at least {mebibytes(needed_bytes(planned))} for the run, the least "
        f"that the planner knows for this data ({shrunk}), found {mebibytes(max(available_bytes, 0))}"
        f"{beside}; the most is {planned.binding.name} with {mebibytes(planned.binding.bytes)} in "
        f"{planned.peak_phase}; "
        f"raise the budget to {mebibytes(needed_bytes(planned) + taken_bytes)}, or lower "
        f"{_others(config)}{_disk_instead(candidate, problem, batches, needed_bytes(planned))}"
    )


def _others(config: Config) -> str:
    """Name settings that the planner leaves alone."""
    if not config.encoder.trained:
        if config.model.output == "two_tower":
            return "model.hidden, two_tower.projection or the features"
        return "hidden or the features"
    recompute = (
        "" if config.encoder.recompute_activations else ", or set encoder.recompute_activations = true"
    )
    return f"encoder.max_length{recompute}"


def _disk_instead(config: Config, problem: Problem, batches: Batches, in_memory_bytes: int) -> str:
    """Say what the smallest settings would need with the output layer on the disk, which is never chosen.

    Nothing where that saves less than a MiB.
    """
    if (config.model.output, config.training.storage, config.training.device) != ("sparse", "memory", "cpu"):
        return ""
    needed = needed_bytes(limited_plan(_with(config, "training", "storage", "disk"), problem, batches))
    if needed > in_memory_bytes - (1 << 20):
        return ""
    return f", or set training.storage = disk (slower), which would need {mebibytes(needed)}"


def _grown(config: Config, shrunk: Config, fits: Callable[[Config], bool]) -> Config:
    """Return the shrunk settings with those restored, as far as they fit, that were shrunk in vain."""
    values = {change.key: (change.before, change.now) for change in changes(config, shrunk)}
    for key in (key for key in reversed(_ORDER) if key in values):
        (before, now), (section, name) = values[key], key.split(".")
        while now != before:
            now = _wider(key, now, before, shrunk)
            larger = _with(shrunk, section, name, now)
            if not fits(larger):
                break
            shrunk = larger
    return shrunk


def _wider(key: str, now: Any, before: Any, config: Config) -> Any:
    """Return the next setting on the way back to the user's own."""
    if isinstance(now, str):
        return _WIDER.get(now, before)
    if key == "two_tower.mini_batch_size" and before == 0:  # everything at once
        return 2 * now if 2 * now <= config.training.batch_size else 0
    return min(before, 2 * now)


def changes(before: Config, after: Config) -> tuple[Change, ...]:
    """Return the settings that differ."""
    old, new = before.model_dump(), after.model_dump()
    return tuple(
        Change(f"{section}.{key}", old[section][key], value)
        for section, settings in new.items()
        for key, value in settings.items()
        if old[section][key] != value
    )


def _candidates(config: Config) -> Iterator[Config]:
    """Yield the settings, ever smaller."""
    yield config
    for shrink in _SHRINKERS:
        while (smaller := shrink(config)) is not None:
            config = smaller
            yield config


def _with(config: Config, section: str, key: str, value: Any) -> Config:
    """Return the settings with another value of one of them."""
    settings = config.model_dump()
    settings[section][key] = value
    return build_config(settings, "memory: settings of the planner")


def _narrow_weights(config: Config) -> Config | None:
    if config.model.output != "sparse" or config.model.weight_dtype != "float32":
        return None
    return _with(config, "model", "weight_dtype", "bfloat16")


def _narrowest_weights(config: Config) -> Config | None:
    if config.model.output != "sparse" or config.model.weight_dtype.startswith("float8"):
        return None
    return _with(config, "model", "weight_dtype", "float8_e4m3fn")


def _narrower_state(config: Config) -> Config | None:
    optimizer = config.output_optimizer
    narrower = {"float32": "bfloat16", "bfloat16": "float8_e4m3fn"}.get(optimizer.state_dtype)
    if config.model.output != "sparse" or optimizer.kind not in ("adam", "momentum") or narrower is None:
        return None
    return _with(config, "output_optimizer", "state_dtype", narrower)


_WIDER = {"float8_e4m3fn": "bfloat16"}
"""What stands between a setting of the planner and the user's own."""


def _one_moment_for_each_label(config: Config) -> Config | None:
    model = config.model
    if model.output != "sparse" or model.direct_fan_in or config.output_optimizer.kind != "adam":
        return None  # direct connections know Adam and SGD only
    return _with(config, "output_optimizer", "kind", "label_adam")


def _smaller_mini_batch(config: Config) -> Config | None:
    settings = config.two_tower
    if config.model.output != "two_tower" or not config.encoder.trained:
        return None  # a bag of words keeps little but its sums
    size = settings.mini_batch_size // 2 or config.training.batch_size
    if settings.mini_batch_size == 1 or size < SMALLEST_MINI_BATCH:
        return None
    return _with(config, "two_tower", "mini_batch_size", size)


def _smaller_batch(config: Config) -> Config | None:
    size = config.training.batch_size // 2
    return _with(config, "training", "batch_size", size) if size >= SMALLEST_BATCH else None


def _no_dense_moments(config: Config) -> Config | None:
    if config.dense_optimizer.kind == "sgd":
        return None
    return _with(config, "dense_optimizer", "kind", "sgd")


def _narrower(config: Config) -> Config | None:
    width = config.model.width // 2
    if config.model.output != "sparse" or width < max(SMALLEST_WIDTH, config.model.fan_in):
        return None
    return _with(config, "model", "width", width)


def _fewer_inputs(config: Config) -> Config | None:
    fan_in = config.model.fan_in // 2
    if config.model.output != "sparse" or fan_in < SMALLEST_FAN_IN:
        return None
    return _with(config, "model", "fan_in", fan_in)


def _fewer_ranked_at_once(config: Config) -> Config | None:
    size = config.training.evaluation_batch // 2
    return _with(config, "training", "evaluation_batch", size) if size >= SMALLEST_BATCH else None


def _smaller_blocks(config: Config) -> Config | None:
    if config.model.output == "two_tower":
        return None  # it has none
    size = config.training.block_bytes // 2
    return _with(config, "training", "block_bytes", size) if size >= SMALLEST_BLOCK_BYTES else None


_SHRINKERS: tuple[Callable[[Config], Config | None], ...] = (
    _fewer_ranked_at_once,
    _smaller_blocks,
    _narrow_weights,
    _narrower_state,
    _one_moment_for_each_label,
    _smaller_mini_batch,
    _smaller_batch,
    _no_dense_moments,
    _narrowest_weights,
    _narrower,
    _fewer_inputs,
)
_ORDER = (
    "training.evaluation_batch",
    "training.block_bytes",
    "model.weight_dtype",
    "output_optimizer.state_dtype",
    "output_optimizer.kind",
    "two_tower.mini_batch_size",
    "training.batch_size",
    "dense_optimizer.kind",
    "model.width",
    "model.fan_in",
)
