"""Quantum and range of every parameter, as exponents of two."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from isograd.errors import InvalidProblemError
from isograd.torch.distributed.reference import HEADROOM, QUANTUM

Exponents = int | Mapping[str, int]
_LEAST, _MOST = -100, 60  # quanta whose multiples are normal numbers of binary32


class Setting(NamedTuple):
    """A parameter's quantum 2^quantum; what N units of a magnitude m must keep: N m < 2^range."""

    quantum: int
    range: int


def resolved(name: str, names: Sequence[str], quantum: Exponents | None, limit: Exponents | None) -> list[Setting]:
    """The settings of parameters; exponents for all, or for names and patterns (the first that matches)."""
    quanta = _spread(name, "quantum", names, quantum)
    limits = _spread(name, "range", names, limit)
    settings = []
    for parameter, q, r in zip(names, quanta, limits, strict=True):
        if q is None:
            q = QUANTUM if r is None else r - HEADROOM
        settings.append(checked(name, parameter, q, q + HEADROOM if r is None else r))
    return settings


def checked(name: str, parameter: str, quantum: int, limit: int) -> Setting:
    """A parameter's setting, if totals in its quantum stay below 2^63."""
    if not _LEAST <= quantum <= _MOST:
        raise InvalidProblemError(
            f"{name}: the quantum of {parameter!r} is 2^{quantum}; accepted exponents: {_LEAST} to {_MOST}"
        )
    if not quantum < limit <= quantum + HEADROOM:
        raise InvalidProblemError(
            f"{name}: the range of {parameter!r} is 2^{limit}; with its quantum of 2^{quantum}, accepted exponents: "
            f"{quantum + 1} to {quantum + HEADROOM}"
        )
    return Setting(quantum, limit)


def _spread(name: str, argument: str, names: Sequence[str], given: Exponents | None) -> list[int | None]:
    if given is None or isinstance(given, int):
        return [_exponent(name, argument, given)] * len(names)
    if not isinstance(given, Mapping):
        raise InvalidProblemError(
            f"{name}: {argument} is {given!r}; expected an exponent of two, or a mapping of parameters' names to them"
        )
    for pattern in given:
        if not isinstance(pattern, str) or not any(fnmatchcase(parameter, pattern) for parameter in names):
            raise InvalidProblemError(f"{name}: {argument} names {pattern!r}, which no parameter matches")
    return [
        next((_exponent(name, argument, e) for pattern, e in given.items() if fnmatchcase(parameter, pattern)), None)
        for parameter in names
    ]


def _exponent(name: str, argument: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidProblemError(f"{name}: {argument} holds {value!r}; expected an exponent of two, an integer")
    return value
