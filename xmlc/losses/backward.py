"""The way back from a gradient that is given."""

from __future__ import annotations

from torch import Tensor


def backward(outputs: Tensor, gradient: Tensor) -> None:
    """Do ``outputs.backward(gradient)``, bit by bit.

    For a gradient that it is given torch imports symbolic shapes, 35 MB that nothing uses.
    """
    (outputs * gradient).sum().backward()
