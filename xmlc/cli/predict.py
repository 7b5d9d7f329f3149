"""``xmlc predict``: labels for texts or features, as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import IO

import click

_STDIN = "stdin"
_AT_ONCE = 1024
_BYTES_AT_ONCE = 1 << 24  # of lines so long that 1,024 of them would be much memory


@click.command(name="predict", short_help="Print the best labels for lines of text or features.")
@click.argument("run", type=click.Path())
@click.argument("file", type=click.File("rb"), default="-")
@click.option(
    "-k", "k", default=5, show_default=True, type=click.IntRange(1), help="Labels for each instance."
)
@click.option(
    "--labels",
    "added",
    type=click.File("rb"),
    help="Labels that came after training, a line for each; of runs of two towers.",
)
@click.option(
    "--search",
    type=click.Choice(["exact", "approximate"]),
    default="exact",
    show_default=True,
    help="approximate: look at some of the labels only, by an index; of runs of two towers (extra search).",
)
@click.option("--checkpoint", type=click.Choice(["best", "latest"]), default="best", show_default=True)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
)
def command(
    run: str,
    file: IO[bytes],
    k: int,
    added: IO[bytes] | None,
    search: str,
    checkpoint: str,
    device: str,
) -> None:
    """Predict the K best labels for every line of FILE (default: stdin) with RUN; JSON lines to stdout.

    An answer is {"labels": [{"label": ID, "name": NAME, "score": SCORE}, ...]}, best first. A score is the
    label's logit: higher is likelier, without a fixed range, to be compared between the labels of one line.
    Trained with loss.kind=bce, 1 / (1 + exp(-score)) is a probability.

    A line is a text, or a JSON object with "title" and "content" or "text". For models of sparse features:
    `feature:value feature:value ...` as in XMC text. For dense features: a JSON list of numbers.

    A line of --labels is a text, which is the label's name as well, or such an object, whose title is. These
    labels are numbered behind those of training.
    """
    from xmlc.errors import DataError
    from xmlc.evaluation import load
    from xmlc.evaluation.inputs import parse_labels, parse_lines

    predictor = load(run, checkpoint, device)
    name = _name(file)
    if added is not None:
        if _name(added) == name == _STDIN:
            raise click.UsageError("--labels and FILE cannot both be read from stdin; name a file for one")
        lines = [line for _, chunk in _chunks(added, _name(added)) for line in chunk]
        predictor = predictor.with_labels(*parse_labels(lines, _name(added)))
    if search == "approximate":
        predictor = predictor.with_index()
    wanted = min(k, predictor.model.problem.label_count)
    if wanted < k:
        click.echo(f"xmlc: note: k = {k}, but the run knows {wanted} labels; all of them are given", err=True)
    for number, lines in _chunks(file, name):
        answers = predictor.predict(parse_lines(predictor, lines, name, number), k)
        for line, predictions in enumerate(answers, number):
            labels = [vars(prediction) for prediction in predictions]
            # A label whose score is NaN or -inf is never among them.
            if sum(math.isfinite(prediction.score) for prediction in predictions) < wanted:
                raise DataError(
                    f"{name}:{line}: scores must be finite, found an overflow; scale the features down"
                )
            click.echo(json.dumps({"labels": labels}, ensure_ascii=False).encode())  # UTF-8 in any locale


def _name(file: IO[bytes]) -> str:
    return str(getattr(file, "name", _STDIN)).strip("<>")


def _chunks(file: IO[bytes], name: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield runs of lines with the number of their first, so that a pipe is answered as it comes."""
    from xmlc.data.reader.files import LONGEST_LINE_BYTES, check_length

    chunk: list[bytes] = []
    number, length = 1, 0
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        check_length(len(line), f"{name}:{number + len(chunk)}")
        chunk.append(line)
        length += len(line)
        if len(chunk) == _AT_ONCE or length >= _BYTES_AT_ONCE:
            yield number, chunk
            number, chunk, length = number + len(chunk), [], 0
    if chunk:
        yield number, chunk
