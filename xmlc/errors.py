"""Errors that a user can act on: *where: what must hold, what was found, what to do.*"""


class XmlcError(Exception):
    """Base of every error that xmlc raises on purpose; the command line ends with exit code 2 on it."""


class ConfigError(XmlcError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(XmlcError):
    """A file or array given as data does not hold what it must."""


class CheckpointError(XmlcError):
    """A run folder or checkpoint cannot be written, or cannot be trusted."""


class NativeError(XmlcError):
    """The native core is absent, does not fit this machine, or was called with wrong tensors."""


class WorkerError(XmlcError):
    """Another worker of a distributed run stopped, or the workers do not agree."""


class OutOfMemoryError(XmlcError):
    """An allocation failed; the message says which, and what would fit."""
