"""``xmlc report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: RUN/report.html]")
def command(run: Path, out: Path | None) -> None:
    """Write one self-contained HTML page about RUN, and print its path.

    Learning curves, metrics by label frequency, moved connections, time by phase and memory, as pictures and
    as tables. A run that is still training can be reported on as well.
    """
    from xmlc.reports import write_report

    click.echo(str(write_report(run, out)))
