"""``xmlc data``: what is known of data sets, what is wrong with them, and what can be made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xmlc.cli import printable

if TYPE_CHECKING:
    from xmlc.data import IndexBase
    from xmlc.data.self_labels import By
    from xmlc.data.writer import Format

_FORMATS = ("xmc", "matrix", "npz", "lf")  # those of xmlc.data.writer, which would import NumPy for --help
_PARTS = (
    "features",
    "texts",
    "filter_pairs",
    "label_names",
    "label_texts",
    "label_features",
    "feature_names",
)


class _IndexBase(click.ParamType):
    """``1`` for all kinds of indices, or ``features=1,labels=0`` for each."""

    name = "index base"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> IndexBase:
        """Parse the option."""
        from xmlc.data import IndexBase

        if not isinstance(value, str):
            return value
        if value in ("0", "1"):
            return IndexBase(*[int(value)] * 3)
        parts = [re.fullmatch(r"(labels|features|instances)=([01])", part) for part in value.split(",")]
        named = {part[1]: int(part[2]) for part in parts if part is not None}
        if len(named) < len(parts):
            self.fail(f"{value!r} is not 0, 1 or kinds such as 'features=1,labels=0'", param, ctx)
        return IndexBase(**named)


_index_base = click.option(
    "--index-base",
    "base",
    type=_IndexBase(),
    default="0",
    metavar="0|1|KIND=0|1,...",
    help="First index of text files; KIND is labels, features or instances (of filter files).  [default: 0]",
)


@click.group(name="data")
def command() -> None:
    """List, describe and check data sets."""


@command.command(name="list", short_help="List the data sets known by name.")
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


@command.command(name="info", short_help="Describe a data set in figures.")
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


@command.command(name="check", short_help="List everything that is wrong with a data set.")
@click.argument("data")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1), help="Stop at so many problems."
)
@_index_base
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
@click.pass_context
def check(ctx: click.Context, data: str, limit: int, base: IndexBase, as_json: bool) -> None:
    """Read all files of DATA, a folder or the name of a known data set, and list what is wrong with them.

    Ends with exit code 0 where nothing is, else 2.
    """
    from xmlc.data.check import check_data

    checked = check_data(data, limit, base)
    if as_json:
        click.echo(json.dumps(checked.to_json(), indent=2))
    else:
        click.echo("\n".join(map(printable, checked.to_lines())))
    ctx.exit(2 if checked.problems else 0)


@command.command(name="convert", short_help="Write a data set in another format, without loss.")
@click.argument("data")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", "layout", required=True, type=click.Choice(_FORMATS), help="Format to write.")
@click.option(
    "--without",
    multiple=True,
    metavar="PART",
    type=click.Choice(_PARTS),
    help="Part to leave out; repeatable.",
)
@_index_base
def convert(data: str, target: Path, layout: Format, without: tuple[str, ...], base: IndexBase) -> None:
    """Write DATA, a folder or the name of a known data set, as a new folder TARGET in another format.

    Formats: xmc (XMC text), matrix (sparse-matrix text), npz (SciPy and NumPy files), lf (LF raw text). A
    part that the format cannot hold is refused unless left out by --without. TARGET appears whole, after it
    was read back and found equal.
    """
    from xmlc.data.convert import convert

    convert(data, target, layout, base, without)
    click.echo(str(target))


@command.command(name="split", short_help="Cut a test split, fair to rare labels, groups kept whole.")
@click.argument("data")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--test", "fraction", default=0.2, show_default=True, type=float, help="Share of test instances."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same split.")
@click.option(
    "--groups",
    type=click.Path(path_type=Path),
    help="File with a group's name for each instance, one per line; a group stays on one side.",
)
@click.option("--identical", is_flag=True, help="Keep instances of the same text or features on one side.")
@click.option("--pool", is_flag=True, help="Split training and test together, where there is a test split.")
@click.option("--to", "layout", type=click.Choice(_FORMATS), help="Format to write.  [default: that of DATA]")
def split(
    data: str,
    target: Path,
    fraction: float,
    seed: int,
    groups: Path | None,
    identical: bool,
    pool: bool,
    layout: Format | None,
) -> None:
    """Write DATA, a folder or the name of a known data set, as a new folder TARGET with a test split.

    Every label's instances are shared out in the proportion of the splits, rare labels first; a label keeps
    at least one training instance. train_rows.txt and test_rows.txt say which row of DATA each instance was.
    """
    from xmlc.data.split import split_dataset

    split_dataset(
        data,
        target,
        fraction=fraction,
        seed=seed,
        groups=groups,
        identical=identical,
        pool=pool,
        layout=layout,
    )
    click.echo(str(target))


@command.command(name="filter", short_help="Make the filter files of a data set whose instances are labels.")
@click.argument("data")
@click.option(
    "--by",
    default="text",
    show_default=True,
    type=click.Choice(["text", "uid", "ids"]),
    help="What is equal in an instance and its own label.",
)
def make_filters(data: str, by: By) -> None:
    """Write filter_labels_train.txt and filter_labels_test.txt into DATA: each instance and its own label.

    By text: equal texts (or the label's name, where labels have no text). By uid: equal "uid" of LF raw text.
    By ids: equal lines of trn_ids.txt, tst_ids.txt and lbl_ids.txt in DATA.
    """
    from xmlc.data.self_labels import write_filters

    for path, pairs in write_filters(data, by).items():
        click.echo(f"{path}: {pairs} pairs")


def _print(values: dict[str, object], indent: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            click.echo(f"{indent}{name}")
            _print(value, indent + "  ")
        elif isinstance(value, float):
            click.echo(f"{indent}{name:{28 - len(indent)}} {value:.4g}")
        else:
            click.echo(f"{indent}{name:{28 - len(indent)}} {value}")
