"""The application behind the `isograd` command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import isograd
from isograd.cli.bench import bench
from isograd.cli.demo import demo
from isograd.cli.diff import diff
from isograd.cli.doctor import doctor
from isograd.cli.kernels import kernels
from isograd.cli.progress import message_console, spell_out
from isograd.cli.verify import verify
from isograd.cli.warmup import warmup
from isograd.errors import IsogradError


class _Commands(TyperGroup):
    """Ends an error of the library as one line and exit status 2, in characters that the terminal has."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        spell_out()
        return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except IsogradError as error:
            message_console().print(f"isograd: {error}", markup=False, style="red", soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    help="Training kernels whose results have the same bits on every run, batch split, thread count and machine.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # A plain traceback is what a bug report needs.
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isograd {isograd.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _command in (verify, warmup, kernels, bench, demo, diff, doctor):
    app.command()(_command)
