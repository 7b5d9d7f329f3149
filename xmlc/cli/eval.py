"""``xmlc eval``: a run's metrics on a test set."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="eval", short_help="Measure a run on a test set.")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option("-k", "k", default=5, show_default=True, type=click.IntRange(1, 1000), help="Largest rank.")
@click.option("--checkpoint", type=click.Choice(["best", "latest"]), default="best", show_default=True)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
)
@click.option("--split", type=click.Choice(["test", "train"]), default="test", show_default=True)
@click.option("--propensity-a", type=float, help="A of the propensity model instead of the data set's.")
@click.option("--propensity-b", type=float, help="B of the propensity model instead of the data set's.")
@click.option("--no-filter", is_flag=True, help="Do not mask the pairs of the filter file.")
@click.option("--deciles", is_flag=True, help="Add every metric by label-frequency decile.")
@click.option(
    "--tower",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Add the cosines of a two-tower run to the logits.",
)
@click.option(
    "--tower-weight",
    type=float,
    help="Weight of the cosines, instead of the best on the instances that both runs held out.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON with fractions instead of a table of percent."
)
def command(
    run: Path,
    data: str | None,
    k: int,
    checkpoint: str,
    device: str,
    split: str,
    propensity_a: float | None,
    propensity_b: float | None,
    no_filter: bool,
    deciles: bool,
    tower: Path | None,
    tower_weight: float | None,
    as_json: bool,
) -> None:
    """Evaluate RUN on the test set of DATA (default: the data set it was trained on)."""
    from xmlc.evaluation.run import evaluate_run, report_table
    from xmlc.training.progress import evaluation_bar

    report = evaluate_run(
        run,
        data,
        k=k,
        which=checkpoint,
        device=device,
        split=split,
        propensity_a=propensity_a,
        propensity_b=propensity_b,
        mask_filter_pairs=not no_filter,
        deciles=deciles,
        tower=tower,
        tower_weight=tower_weight,
        progress=evaluation_bar,
    )
    click.echo(json.dumps(report, indent=2) if as_json else report_table(report))
