"""Which inputs a label has: how connections start, and when and how many of them move."""

from xmlc.sparsity.connectivity import (
    DirectStart,
    direct_connectivity,
    draw_connections,
    index_dtype,
    random_connectivity,
)
from xmlc.sparsity.redistribution import RedistributionPolicy

__all__ = [
    "DirectStart",
    "RedistributionPolicy",
    "direct_connectivity",
    "draw_connections",
    "index_dtype",
    "random_connectivity",
]
