"""xmlc: extreme multi-label classification with a uniform fan-in sparse output layer."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmlc.data.store import open_dataset
    from xmlc.evaluation.predict import load
    from xmlc.nn.compressed import compressed_activations
    from xmlc.nn.sparse_head import SparseHead
    from xmlc.training.api import train
    from xmlc.training.estimator import XmlcClassifier
    from xmlc.training.profiling import Sizes, profile

if "torch" not in sys.modules:
    # torch's idle OpenMP threads spin by default, and take the processors from our kernels' threads and from
    # every other process: on two busy cores an epoch took 22 s instead of 2. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "Sizes",
    "SparseHead",
    "XmlcClassifier",
    "__version__",
    "compressed_activations",
    "load",
    "open_dataset",
    "profile",
    "train",
]

_HOMES = {
    "Sizes": "xmlc.training.profiling",
    "SparseHead": "xmlc.nn.sparse_head",
    "XmlcClassifier": "xmlc.training.estimator",
    "compressed_activations": "xmlc.nn.compressed",
    "load": "xmlc.evaluation.predict",
    "open_dataset": "xmlc.data.store",
    "profile": "xmlc.training.profiling",
    "train": "xmlc.training.api",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `import xmlc` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'xmlc' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
