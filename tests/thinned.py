"""Choices of cases: what every run of the tests has, and what is left to an exhaustive one."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """A case that exhaustive runs alone have."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def thinned(every: int, *parts: Iterable[Any]) -> list[Any]:
    """All combinations of one element of each part; those whose places add up to no multiple of `every` are exhaustive.

    The others hold every element of a part where the other parts have at least `every` elements between them.
    """
    sequences: list[Sequence[Any]] = [list(part) for part in parts]
    cases = []
    for places in itertools.product(*(range(len(part)) for part in sequences)):
        values = [part[i] for part, i in zip(sequences, places, strict=True)]
        cases.append(pytest.param(*values) if sum(places) % every == 0 else exhaustive(*values))
    return cases
