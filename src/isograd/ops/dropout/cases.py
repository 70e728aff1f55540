"""The inputs that dropout is verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Case, normal, store

_STREAM = 3300


def dropout(dtype: str) -> Iterator[Case]:
    """Several probabilities, seeds and offsets, blocks of numbers that begin anywhere, and special values."""
    for i, shape in enumerate(((6, 1), (5, 31), (40, 256), (3, 5000))):
        x = store(2.0 * normal(shape, _STREAM + i), dtype)
        for k, p in enumerate((0.0, 0.1, 0.5, 0.93, 1.0)):
            options = {"p": p, "seed": 7 * i + 2**40 * k, "offset": (0, 5, 2**33, 2**63 + 1)[(i + k) % 4]}
            yield Case(f"{shape[0]} x {shape[1]}, p={p}", {"x": x}, options)
    special = normal((4, 300), _STREAM + 9).copy()
    special[0, :25] = np.tile([np.nan, np.inf, -np.inf, 0.0, -0.0], 5)
    yield Case("NaN, inf and zeros", {"x": store(special, dtype)}, {"p": 0.4, "seed": 3, "offset": 1})
