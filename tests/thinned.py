"""Choices of cases: what every run of the tests has, what `.ci/run` adds, and what is left to an exhaustive run."""

import itertools
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


def thinned(every: int, *parts: Iterable[Any]) -> list[Any]:
    """All combinations of one element of each part; those whose places add up to no multiple of `every` are exhaustive.

    The others hold every element of a part: the places of the other parts add up to all remainders.
    """
    sequences: list[Sequence[Any]] = [list(part) for part in parts]
    for part in sequences:
        assert every <= 1 + sum(len(other) - 1 for other in sequences) - (len(part) - 1), "an element would be in none"
    cases = []
    for places in itertools.product(*(range(len(part)) for part in sequences)):
        values = [part[i] for part, i in zip(sequences, places, strict=True)]
        cases.append(pytest.param(*values) if sum(places) % every == 0 else exhaustive(*values))
    return cases
