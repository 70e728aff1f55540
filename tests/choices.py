"""Choices of cases: what every run of the tests has, what `.ci/run` adds, and what is left to an exhaustive run."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

# Every run tests one dtype of 16 bits and one of 32; the others have the same code, compiled once more.
OTHER_DTYPES = {"float16", "float64"}


def exhaustive(*values: Any) -> Any:
    """A case that exhaustive runs alone have."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def thorough(*values: Any) -> Any:
    """A case that thorough runs have, `.ci/run` among them."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def first_only(values: Iterable[Any]) -> list[Any]:
    """Values as parameters: all but the first are thorough."""
    first, *others = values
    return [first, *map(thorough, others)]


def quick_first(suites: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Suites of a script as parameters: all but the quick ones are thorough."""
    return [suite if suite in quick else thorough(suite) for suite in suites]


def alongside(suite: str, suites: Iterable[str], quick: Sequence[str]) -> tuple[str, ...]:
    """The suites that run in one process with a suite: the quick ones, or the others."""
    return tuple([other for other in suites if (other in quick) is (suite in quick)])


def has_other_dtype(item: pytest.Item) -> bool:
    """Whether a parameter of a test is, or holds, one of the other dtypes, in NumPy's, torch's or no spelling."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, tuple):
            for part in value:
                yield from names(part)
        else:
            yield getattr(value, "__name__", str(value).removeprefix("torch."))

    callspec = getattr(item, "callspec", None)
    return callspec is not None and not OTHER_DTYPES.isdisjoint(names(tuple(callspec.params.values())))


def _combinations(every: int, parts: Iterable[Iterable[Any]]) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """All combinations of one element of each part, with whether their places add up to a multiple of `every`.

    Those hold every element of a part: the places of the other parts add up to all remainders.
    """
    sequences: list[Sequence[Any]] = [list(part) for part in parts]
    for part in sequences:
        assert every <= 1 + sum(len(other) - 1 for other in sequences) - (len(part) - 1), "an element would be in none"
    for places in itertools.product(*(range(len(part)) for part in sequences)):
        yield sum(places) % every == 0, tuple(part[i] for part, i in zip(sequences, places, strict=True))


def thinned(every: int, *parts: Iterable[Any]) -> list[Any]:
    """Combinations of one element of each part as parameters: about one in `every`, the others are exhaustive."""
    return [pytest.param(*v) if chosen else exhaustive(*v) for chosen, v in _combinations(every, parts)]


# --- in scripts that run under Triton's interpreter, which are told by an argument to take all ------------------------
EXHAUSTIVE = "--exhaustive" in sys.argv


def few(every: int, *parts: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Combinations of one element of each part, about one in `every`; exhaustive runs take all."""
    return (values for chosen, values in _combinations(every, parts) if chosen or EXHAUSTIVE)


def around(count: int, *parts: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """`count` combinations that go round all parts, each slower than the one before; exhaustive runs take all."""
    if EXHAUSTIVE:
        yield from itertools.product(*parts)
    else:
        for n in range(count):
            yield tuple(part[n // (i + 1) % len(part)] for i, part in enumerate(parts))


def through(*parts: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """As many combinations as the longest part has elements, each element in one or more; exhaustive runs take all."""
    if EXHAUSTIVE:
        yield from itertools.product(*parts)
    else:
        for n in range(max(map(len, parts))):
            yield tuple(part[n % len(part)] for part in parts)
