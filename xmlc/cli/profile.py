"""``xmlc profile``: memory planned, measured, and fitted into a budget."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from xmlc.config import PRESETS

_MOST = 2**31 - 1  # rows and columns that indices of 32 bits can name
_SIZE = click.IntRange(1, _MOST)


@click.command(name="profile", short_help="Plan and measure the memory of a run.")
@click.argument("data", required=False)
@click.option("--labels", type=_SIZE, help="Labels, where no DATA is named.")
@click.option("--dim", type=_SIZE, default=768, show_default=True, help="Dense features.")
@click.option("--sparse-features", type=click.IntRange(0, _MOST), default=0, help="Sparse features instead.")
@click.option("--words", type=_SIZE, default=100, show_default=True, help="Of an instance.")
@click.option("--instances", type=_SIZE, default=1_000_000, show_default=True)
@click.option("--fan-in", type=_SIZE, help="model.fan_in")
@click.option("--width", type=click.IntRange(0, _MOST), help="model.width")
@click.option("--batch", type=_SIZE, help="training.batch_size")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--recipe", is_flag=True, help="Start from the data set's committed recipe.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Settings to start from.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="training.device; a plan needs none.")
@click.option("--measure", is_flag=True, help="Train a few steps, on generated data where no DATA is named.")
@click.option("--check", is_flag=True, help="Measure; exit code 1 where plan and process differ too much.")
@click.option("--budget", metavar="SIZE", help="Memory, or a device's, to fit settings into, e.g. 4GiB.")
@click.option("--enforce", is_flag=True, help="With --measure: make the budget a hard limit.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    help="With --measure on cuda: write what torch's allocator did, for pytorch.org/memory_viz.",
)
@click.option("--explain", is_flag=True, help="Show every tensor with its formula.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="Also write a page with pictures here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    data: str | None,
    labels: int | None,
    dim: int,
    sparse_features: int,
    words: int,
    instances: int,
    fan_in: int | None,
    width: int | None,
    batch: int | None,
    file: Path | None,
    recipe: bool,
    preset: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    measure: bool,
    check: bool,
    budget: str | None,
    enforce: bool,
    snapshot: Path | None,
    explain: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Say what memory a run on DATA, or on any data of --labels, will take at its peak, phase by phase."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to stderr otherwise
    from xmlc.reports import check_target, write_profile
    from xmlc.training import profiling

    for target in (page, snapshot):
        if target is not None:
            check_target(target)
    source: str | profiling.Sizes
    if data is not None and labels is None:
        source = data
    elif data is None and labels is not None:
        source = profiling.Sizes(labels, dim, sparse_features, words, instances)
    else:
        raise click.UsageError("name DATA, or give --labels, and not both")
    flags = {
        "model.fan_in": fan_in,
        "model.width": width,
        "training.batch_size": batch,
        "training.device": device,
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    found = profiling.profile(
        source,
        config=file,
        preset=preset,
        recipe=recipe,
        overrides=(*overrides, *given),
        measured=measure or check,
        budget=budget,
        enforce=enforce,
        snapshot=snapshot,
    )
    if page is not None:
        write_profile(profiling.as_json(found, explain=True), page)
    if as_json:
        click.echo(json.dumps(profiling.as_json(found, explain), indent=2))
    else:
        click.echo(profiling.as_text(found, explain))
    if check and not found.within:
        click.echo("xmlc: plan and measurement differ by more than 5 % + 8 MiB", err=True)
        sys.exit(1)
