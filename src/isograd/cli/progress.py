"""What the commands share on the terminal: consoles, progress that tells of compilation, optional packages."""

from __future__ import annotations

import codecs
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from numba.core import event
from numba.core.caching import NullCache
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isograd.errors import IsogradError

ISSUES = "https://github.com/isograd/isograd/issues"
INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as shells have it
_INTERVAL = 5.0  # seconds between two lines of progress where there is no terminal
_COMPILING = "Compiling kernels that this machine has not used yet; they are kept on disk."
_COMPILING_EACH_TIME = (
    "Compiling kernels for this machine. No folder is writable for the result, so every run does it again; "
    "NUMBA_CACHE_DIR can name one."
)
# What formulas are written in, for streams that cannot encode it.
_SPELLED = {"·": "*", "Σ": "sum ", "η": "eta", "δ": "delta", "λ": "lambda", "ε": "eps", "²": "^2"}


class MissingPackageError(IsogradError, ImportError):
    """A command needs a package that is not installed."""


def optional(module: str, package: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {package}, which is not installed: pip install 'isograd[{extra}]'"
        ) from error


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(character, "?") for character in missing), error.end


def spell_out() -> None:
    """Let standard output spell the characters that its encoding lacks, where Python would raise."""
    codecs.register_error("isograd.spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="isograd.spelled")


def output_console() -> Console:
    """Where results go."""
    return Console(highlight=False, soft_wrap=False)


def message_console() -> Console:
    """Where progress and messages go, so that the output of `--json` stays pure."""
    return Console(stderr=True, highlight=False)


@contextmanager
def until_interrupted() -> Iterator[list[KeyboardInterrupt]]:
    """Let Ctrl-C end the block and no more; the list holds it then."""
    caught: list[KeyboardInterrupt] = []
    try:
        yield caught
    except KeyboardInterrupt as interrupt:
        caught.append(interrupt)


def tell_digest(console: Console, digest: str, expected: str | None, otherwise: str) -> None:
    """Show the digest of trained weights beside the published one, or say why there is none."""
    console.print(f"\nSHA-256 of the final weights: {digest}", soft_wrap=True)
    if expected is None:
        console.print(f"There is no published digest for {otherwise}", soft_wrap=True)
        return
    console.print(f"published:                    {expected}", soft_wrap=True)
    if digest == expected:
        console.print("[green]They agree:[/green] every weight has the same bits as on every other machine.")
    else:
        console.print(
            "[red]They differ.[/red] `isograd verify` tells which kernel is at fault; please report its output at "
            f"{ISSUES}."
        )


class Activity(event.Listener):
    """Progress that says when the time goes into compiling kernels: a bar, or plain lines where there is no terminal.

    Numba announces each compilation; kernels that are loaded from its cache on disk are not compiled.
    """

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title, self._total, self._done = title, total, 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, detail="")
        self._detail = self._compiled = ""
        self._depth = 0
        self._announced = False
        self._began = time.monotonic()
        self._over = threading.Event()

    def step(self, detail: str, advance: int = 1) -> None:
        """Say what is being done now."""
        self._detail = detail
        self._done += advance
        self._progress.update(self._task, advance=advance, detail=detail)

    def __str__(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        compiled = f" (compiling {self._compiled})" if self._compiled else ""
        return f"{self._title}: {self._done} of {self._total}, {minutes}:{seconds:02d}, {self._detail}{compiled}"

    def _tell(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._console.print(str(self), markup=False, soft_wrap=True)

    def on_start(self, started: Any) -> None:
        """A compilation starts; those of functions called by a kernel are nested in the kernel's own."""
        self._depth += 1
        if self._depth > 1:
            return
        dispatcher = started.data["dispatcher"]
        if not self._announced:
            self._announced = True
            kept = not isinstance(dispatcher._cache, NullCache)
            self._console.print(_COMPILING if kept else _COMPILING_EACH_TIME)
        self._compiled = dispatcher.py_func.__name__
        self._progress.update(self._task, detail=f"{self._detail} [dim](compiling {self._compiled})[/dim]")

    def on_end(self, ended: Any) -> None:
        """A compilation ended."""
        self._depth -= 1
        if self._depth == 0:
            self._compiled = ""
            self._progress.update(self._task, detail=self._detail)

    def __enter__(self) -> Self:
        event.register("numba:compile", self)  # type: ignore[no-untyped-call]
        self._progress.start()
        if not self._console.is_terminal:
            threading.Thread(target=self._tell, name="isograd progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._progress.stop()
        event.unregister("numba:compile", self)  # type: ignore[no-untyped-call]
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._console.print(f"Interrupted. {self}", markup=False, soft_wrap=True)
