"""``xmlc info``: what this build and machine can do."""

from __future__ import annotations

import click


@click.command(name="info", short_help="Say what this build and machine can do.")
def command() -> None:
    """Say what was built, what was found on this machine, and what is in use."""
    import platform

    import torch

    from xmlc import __version__, native

    facts = native.describe()
    rows = {
        "xmlc": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "machine": f"{facts['machine']}, {facts['processors']} processors",
        "CPU kernels": f"{', '.join(facts['cpu_kernels'])} (in use: {facts['cpu_kernels_in_use']})",
        "CUDA kernels": facts["cuda_kernels"],
        "CUDA device": facts["cuda_device"],
        "native module": facts["module"],
    }
    for name, value in rows.items():
        click.echo(f"{name:14} {value}")
