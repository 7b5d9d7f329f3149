"""``xmlc train``: a data set and a config to a run folder."""

from __future__ import annotations

from pathlib import Path

import click

from xmlc.config import PRESETS


@click.command(name="train", short_help="Train on a data set; write a run folder.")
@click.argument("data")
@click.option("--out", "run", required=True, type=click.Path(path_type=Path), help="Run folder to create.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--recipe", is_flag=True, help="Start from the data set's committed recipe.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Settings to start from.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable."
)
@click.option(
    "--paper-protocol",
    is_flag=True,
    help="Let the TEST set choose rate, epoch and early stop, as published tables did. Not for new results.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to train: training.device.")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its latest checkpoint.")
@click.option("--budget", metavar="SIZE", help="Memory, or a device's, to fit settings into, e.g. 4GiB.")
@click.option("--enforce", is_flag=True, help="Make the budget a hard limit.")
def command(
    data: str,
    run: Path,
    file: Path | None,
    recipe: bool,
    preset: str | None,
    overrides: tuple[str, ...],
    paper_protocol: bool,
    device: str | None,
    resume: bool,
    budget: str | None,
    enforce: bool,
) -> None:
    """Train on DATA, a folder or the name of a known data set (`xmlc data list`).

    The best checkpoint by the held-out validation metric is kept; `xmlc eval` measures it on the test set.
    """
    from xmlc.training.api import train_run

    if paper_protocol:
        overrides = (*overrides, "training.paper_protocol=true")
    if device is not None:
        overrides = (*overrides, f"training.device={device}")
    rank = train_run(
        data,
        out=run,
        config=file,
        recipe=recipe,
        preset=preset,
        overrides=overrides,
        resume=resume,
        budget=budget,
        enforce=enforce,
    )
    if rank == 0:
        click.echo(str(run))
