"""The inputs that silu, gelu and their gradients are verified with."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Case, normal, store

_STREAM = 3000


def _arrays(dtype: str, stream: int) -> Iterator[tuple[str, dict[str, Array]]]:
    """Name, dy and x: what hurts."""
    large = {"float16": 2.0**6, "float64": 2.0**300}.get(dtype, 2.0**60)
    factors = [("few", 2.0, 1.0), ("wide", 40.0, 1.0), ("tiny", 1 / large, 1 / large), ("large gradients", 2.0, large)]
    for i, shape in enumerate(((6, 1), (5, 31), (40, 256), (3, 5000))):
        name, of_x, of_dy = factors[i]
        arrays = {"dy": normal(shape, stream + 2 * i) * of_dy, "x": normal(shape, stream + 2 * i + 1) * of_x}
        yield f"{shape[0]} x {shape[1]}, {name}", {key: store(a, dtype) for key, a in arrays.items()}
    special = {key: normal((4, 300), stream + 20 + k).copy() for k, key in enumerate(("dy", "x"))}
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    for step, a in zip((1, 5), special.values(), strict=True):
        a[0, :25] = values[np.arange(25) // step % 5]
    yield "NaN, inf and zeros", {key: store(a, dtype) for key, a in special.items()}


def _cases(dtype: str, stream: int, options: dict[str, Any], names: tuple[str, ...]) -> Iterator[Case]:
    for name, arrays in _arrays(dtype, stream):
        label = ", ".join([name, *[f"approximate={value}" for value in options.values()]])
        yield Case(label, {key: arrays[key] for key in names}, options)


_FORMS = [{"approximate": "none"}, {"approximate": "tanh"}]


def silu(dtype: str) -> Iterator[Case]:
    """Ordinary numbers, wide ones, tiny ones and special ones."""
    yield from _cases(dtype, _STREAM, {}, ("x",))


def silu_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    yield from _cases(dtype, _STREAM + 50, {}, ("dy", "x"))


def gelu(dtype: str) -> Iterator[Case]:
    """The same in both forms."""
    for form in _FORMS:
        yield from _cases(dtype, _STREAM + 100, form, ("x",))


def gelu_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    for form in _FORMS:
        yield from _cases(dtype, _STREAM + 150, form, ("dy", "x"))
