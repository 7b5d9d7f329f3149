"""``xmlc export``: a two-tower run for other programs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="export", short_help="Write a two-tower run for sentence-transformers.")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Choice(["best", "latest"]), default="best", show_default=True)
def command(run: Path, out: Path, checkpoint: str) -> None:
    """Write RUN's encoder and its labels' embeddings into the new folder OUT.

    Of a transformer, SentenceTransformer(OUT) loads the encoder. label_embeddings.npy and labels.jsonl
    hold the labels' embeddings and names, for an index such as faiss.
    """
    from xmlc.evaluation.export import export

    click.echo(str(export(run, out, checkpoint)))
