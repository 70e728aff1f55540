"""Where the commands leave files: looked at before the work begins, so that no result is lost at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isograd.errors import IsogradError


class OutputError(IsogradError, OSError):
    """A file of results that cannot be written."""


def checked_folder(folder: Path, option: str = "--output") -> Path:
    """A folder that an option names, made if it is missing; OutputError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{option} is '{folder}', where no file can be written ({error.strerror}); expected a writeable folder"
        ) from error
    return folder


def checked_file(path: Path | None, option: str = "--output") -> Path | None:
    """A file that an option names, if it does; OutputError if it cannot be written. What it holds stays."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise OutputError(f"{option} is '{path}', which cannot be written ({error.strerror})") from error
    return path


def save(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file of results that have been shown already; OutputError if that fails in spite of all."""
    try:
        write(path)
    except OSError as error:
        raise OutputError(f"'{path}' could not be written ({error.strerror}); the results are above") from error
