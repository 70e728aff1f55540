"""The options that several commands have, and what they accept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from isograd.cli.suites import SUITES
from isograd.core.checks import DTYPES, INDEX_DTYPES
from isograd.errors import InvalidProblemError

TYPES = (*DTYPES, *INDEX_DTYPES)

Operations = Annotated[
    list[str] | None,
    typer.Option("--operation", help=f"Only this operation; may be repeated. Accepted: {', '.join(SUITES)}."),
]
Types = Annotated[
    list[str] | None, typer.Option("--dtype", help=f"Only this dtype; may be repeated. Accepted: {', '.join(TYPES)}.")
]


def require_accepted(option: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    """InvalidProblemError for the first value that an option does not accept."""
    known = list(accepted)
    for value in given:
        if value not in known:
            raise InvalidProblemError(f"{option} is {value!r}; accepted: {', '.join(known)}")
