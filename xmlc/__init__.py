"""xmlc: extreme multi-label classification with a uniform fan-in sparse output layer."""

__version__ = "0.1.0"
