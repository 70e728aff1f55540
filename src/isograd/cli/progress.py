"""What the commands share on the terminal: consoles, a progress bar that tells of compilation, optional packages."""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any, Self

from numba.core import event
from numba.core.caching import NullCache
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isograd.errors import IsogradError

_COMPILING = "Compiling kernels that this machine has not used yet; they are kept on disk."
_COMPILING_EACH_TIME = (
    "Compiling kernels for this machine. No folder is writable for the result, so every run does it again; "
    "NUMBA_CACHE_DIR can name one."
)


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


def output_console() -> Console:
    """Where results go."""
    return Console(highlight=False, soft_wrap=False)


def message_console() -> Console:
    """Where progress and messages go, so that the output of `--json` stays pure."""
    return Console(stderr=True, highlight=False)


class Activity(event.Listener):
    """A progress bar that says when the time goes into compiling kernels.

    Numba announces each compilation; kernels that are loaded from its cache on disk are not compiled.
    """

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
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
        self._detail = ""
        self._depth = 0
        self._announced = False

    def step(self, detail: str, advance: int = 1) -> None:
        """Say what is being done now."""
        self._detail = detail
        self._progress.update(self._task, advance=advance, detail=detail)

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
        name = dispatcher.py_func.__name__
        self._progress.update(self._task, detail=f"{self._detail} [dim](compiling {name})[/dim]")

    def on_end(self, ended: Any) -> None:
        """A compilation ended."""
        self._depth -= 1
        if self._depth == 0:
            self._progress.update(self._task, detail=self._detail)

    def __enter__(self) -> Self:
        event.register("numba:compile", self)  # type: ignore[no-untyped-call]
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        event.unregister("numba:compile", self)  # type: ignore[no-untyped-call]
