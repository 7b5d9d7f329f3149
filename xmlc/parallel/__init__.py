"""What the workers of a torch.distributed group do together."""

from xmlc.parallel.loco import LoCo, LowBitWorkers, loco_hook
from xmlc.parallel.shares import LabelShares, OwnLabels, as_bytes, deal_labels, gather_compressed
from xmlc.parallel.workers import ALONE, Workers, check_group, joined

__all__ = [
    "ALONE",
    "LabelShares",
    "LoCo",
    "LowBitWorkers",
    "OwnLabels",
    "Workers",
    "as_bytes",
    "check_group",
    "deal_labels",
    "gather_compressed",
    "joined",
    "loco_hook",
]
