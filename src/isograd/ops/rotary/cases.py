"""The inputs that rotary and its gradient are verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Array, Case, normal, store
from isograd.numerics.storage import compute_dtype

_STREAM = 3400


def _table(positions: int, pairs: int, stream: int, work: str) -> list[Array]:
    """Numbers between -1 and 1 in place of cosines and sines."""
    return [np.clip(normal((positions, pairs), stream + k) / 2, -1, 1).astype(work) for k in (0, 1)]


def _cases(dtype: str, name: str) -> Iterator[Case]:
    large = {"float16": 2.0**10, "float64": 2.0**300}.get(dtype, 2.0**60)
    work = compute_dtype(dtype)
    problems: list[tuple[tuple[int, ...], int, float]] = [
        ((6, 2), 1, 1.0),
        ((5, 31), 12, 1 / large),
        ((40, 256), 128, 1.0),
        ((2, 3, 7, 80), 32, 20.0),
        ((3, 5000), 9, large),
    ]
    for i, (shape, pairs, factor) in enumerate(problems):
        x = store(normal(shape, _STREAM + i) * factor, dtype)
        table = _table(shape[-2], pairs, _STREAM + 20 + 2 * i, work)
        cos, sin = (np.broadcast_to(t, (*shape[:-1], pairs)).copy() for t in table)
        for interleaved in (False, True):
            label = f"{' x '.join(map(str, shape))}, {pairs} pairs{', interleaved' if interleaved else ''}"
            yield Case(label, {name: x, "cos": cos, "sin": sin}, {"interleaved": interleaved})
    special = normal((4, 40), _STREAM + 9).copy()
    special[0] = np.tile([np.nan, np.inf, -np.inf, 0.0, -0.0], 8)
    cos, sin = _table(4, 16, _STREAM + 40, work)
    yield Case("NaN, inf and zeros", {name: store(special, dtype), "cos": cos, "sin": sin})


def rotary(dtype: str) -> Iterator[Case]:
    """Both layouts, whole rows and parts of them, tables that heads share."""
    yield from _cases(dtype, "x")


def rotary_backward(dtype: str) -> Iterator[Case]:
    """The same."""
    yield from _cases(dtype, "dy")
