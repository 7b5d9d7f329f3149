"""What the workers of a torch.distributed group do together."""

from xmlc.parallel.workers import Workers

__all__ = ["Workers"]
