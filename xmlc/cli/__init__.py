"""The command line, one file per verb and no logic: arguments in, results to stdout, progress to stderr."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from io import UnsupportedOperation
from typing import Any

import click

from xmlc import __version__
from xmlc.errors import XmlcError


class Group(click.Group):
    """Loads a verb when it is called, so that ``--help`` need not wait for torch, and reports errors."""

    verbs = ("train", "eval", "predict", "export", "data", "profile", "report", "info")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of use."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module and return its command."""
        if cmd_name not in self.verbs:
            return None
        from importlib import import_module

        return import_module(f"xmlc.cli.{cmd_name}").command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; an error on purpose ends with one line on stderr and exit code 2."""
        try:
            return super().invoke(ctx)
        except XmlcError as error:
            click.echo(f"xmlc: {printable(error)}", err=True)
            number = getattr(error, "signal_number", None)
            ctx.exit(2 if number is None else 128 + number)
        except KeyboardInterrupt:  # before training notes signals itself, and in the other verbs
            click.echo("xmlc: interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        except BrokenPipeError:  # the reader of our output has gone: `xmlc predict ... | head`
            _drop_output()
            ctx.exit(0)
        except OSError as error:  # stdout on a full disk, for one
            click.echo(f"xmlc: {printable(error)}", err=True)
            _drop_output()
            ctx.exit(2)


def printable(message: object) -> str:
    """Escape what could break the line or steer the terminal; a file's name may hold anything."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in str(message)
    )


def _drop_output() -> None:
    """Send what is still buffered for stdout nowhere, so that Python does not fail on it at its end."""
    with suppress(UnsupportedOperation):  # stdout may be no file, where another program calls
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    click.echo(f"xmlc: warning: {printable(message)}", err=True)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="xmlc")
def main() -> None:
    """Train extreme multi-label classifiers with a uniform fan-in sparse output layer.

    Start with: xmlc train wordnet-mini --out runs/first
    """
    warnings.showwarning = _show_warning  # type: ignore[assignment]
