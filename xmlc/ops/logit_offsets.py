"""Numbers added to single logits, for inputs that are too sparse to be rows of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xmlc.errors import NativeError
from xmlc.ops import checks


@dataclass(frozen=True)
class LogitOffsets:
    """``logits[label[e], instance[e]] += value[e]`` for every entry e; a pair may occur several times."""

    label: Tensor
    """int32 [entry], rising."""
    instance: Tensor
    """int32 [entry], in [0, batch)."""
    value: Tensor
    """float32 [entry]."""
    gradient: Tensor
    """float32 [entry]: d loss / d value, written by `fused_step`."""

    @classmethod
    def of(cls, label: Tensor, instance: Tensor, value: Tensor) -> LogitOffsets:
        """Return the offsets with room for their gradients."""
        return cls(label, instance, value, torch.zeros_like(value))

    @classmethod
    def given(
        cls,
        label: Tensor | None,
        instance: Tensor | None,
        value: Tensor | None,
        gradient: Tensor | None = None,
    ) -> LogitOffsets:
        """Return the offsets of a registered op's arguments, none of them where ``label`` is None."""
        if label is None or instance is None or value is None:
            none = torch.empty(0, dtype=torch.int32)
            return cls.of(none, none, torch.empty(0))
        return cls.of(label, instance, value) if gradient is None else cls(label, instance, value, gradient)

    def and_also(self, others: LogitOffsets | None) -> LogitOffsets:
        """Return the entries of both, by rising label; the same offsets where there are no others."""
        return self if others is None else self.merged(others)[0]

    def merged(self, others: LogitOffsets) -> tuple[LogitOffsets, Tensor]:
        """Return the entries of both, by rising label, and at which of them these are. int64 [entry]"""
        label, instance, value = (
            torch.cat([getattr(self, name), getattr(others, name)]) for name in ("label", "instance", "value")
        )
        order = label.argsort(stable=True)
        places = order.argsort()[: self.label.numel()]
        return LogitOffsets.of(label[order], instance[order], value[order]), places

    def to(self, device: torch.device) -> LogitOffsets:
        """Return the offsets on a device; themselves where they are there."""
        return LogitOffsets(**{name: value.to(device) for name, value in vars(self).items()})


ABSENT = {"label": 0, "instance": 0, "value": 0, "gradient": 0, "entry": 0}
"""No offsets, as the native core's ``LogitOffsets`` takes them."""


def check_tensors(op: str, offsets: LogitOffsets | None) -> None:
    """Check what torch's dispatch would report less helpfully; see `checks.tensors`."""
    if offsets is not None:
        checks.tensors(op, **{f"offsets.{name}": value for name, value in vars(offsets).items()})


def checked(op: str, offsets: LogitOffsets, label: int, batch: int) -> dict[str, int]:
    """Check the offsets and return them as the native core's ``LogitOffsets`` takes them.

    Raises:
        NativeError: A dtype, shape, label or instance does not fit.
    """
    shape = (offsets.label.numel(),)
    ranges = {"label": (offsets.label, label), "instance": (offsets.instance, batch)}
    for name, (value, end) in ranges.items():
        checks.tensor(op, f"offsets.{name}", value, shape, "[entry]", torch.int32)
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < end:
            raise NativeError(
                f"{op}: offsets.{name} must lie in [0, {end}), "
                f"got values from {int(value.min())} to {int(value.max())}"
            )
    if bool((offsets.label.diff() < 0).any()):
        raise NativeError(f"{op}: offsets.label must rise, got falling labels; sort the entries by label")
    checks.tensor(op, "offsets.value", offsets.value, shape, "[entry]", torch.float32)
    checks.tensor(op, "offsets.gradient", offsets.gradient, shape, "[entry]", torch.float32)
    return {
        "label": offsets.label.data_ptr(),
        "instance": offsets.instance.data_ptr(),
        "value": offsets.value.data_ptr(),
        "gradient": offsets.gradient.data_ptr(),
        "entry": offsets.label.numel(),
    }


def add_reference(logits: Tensor, offsets: LogitOffsets | None) -> Tensor:
    """Return logits [label, batch] with the offsets added; for small layers, in any floating dtype."""
    if offsets is None:
        return logits
    places = (offsets.label.long(), offsets.instance.long())
    return logits.index_put(places, offsets.value.to(logits.dtype), accumulate=True)
