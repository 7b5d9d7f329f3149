"""``xmlc data``: what is known of data sets."""

from __future__ import annotations

import json

import click


@click.group(name="data")
def command() -> None:
    """List known data sets and describe one."""


@command.command(name="list")
def list_sets() -> None:
    """List the data sets known by name, and whether their files are here."""
    from xmlc.data.card import data_folder, list_cards
    from xmlc.errors import DataError

    for card in list_cards():
        try:
            here = bool(data_folder(card))
        except DataError:
            here = False
        click.echo(f"{card.name:26} {'here' if here else '-':5} {card.kind:7} {card.title}")


@command.command(name="info")
@click.argument("data")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(data: str, as_json: bool) -> None:
    """Describe DATA, a folder or the name of a known data set: counts, tail, gaps, overlap, fingerprint."""
    from xmlc.data import open_dataset
    from xmlc.data.describe import describe

    described = describe(open_dataset(data))
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    _print(described, "")


def _print(values: dict[str, object], indent: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            click.echo(f"{indent}{name}")
            _print(value, indent + "  ")
        elif isinstance(value, float):
            click.echo(f"{indent}{name:{28 - len(indent)}} {value:.4g}")
        else:
            click.echo(f"{indent}{name:{28 - len(indent)}} {value}")
