"""The inputs that silu_mul, gelu_mul and their gradients are verified with."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Case, normal, store

_STREAM = 2400


def _arrays(dtype: str, stream: int) -> Iterator[tuple[str, dict[str, Array]]]:
    """Name, dy, gate and up: what hurts."""
    large = {"float16": 2.0**6, "float64": 2.0**300}.get(dtype, 2.0**60)
    factors = [("few", 2.0, 1.0), ("wide gates", 40.0, 1.0), ("tiny", 1 / large, 1 / large), ("large", 2.0, large)]
    for i, shape in enumerate(((6, 1), (5, 31), (40, 256), (3, 5000))):
        name, of_gate, of_up = factors[i]
        dy, gate, up = (normal(shape, stream + 3 * i + k) for k in range(3))
        arrays = {"dy": dy, "gate": gate * of_gate, "up": up * of_up}
        yield f"{shape[0]} x {shape[1]}, {name}", {key: store(a, dtype) for key, a in arrays.items()}
    special = {key: normal((4, 300), stream + 20 + k).copy() for k, key in enumerate(("dy", "gate", "up"))}
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    for step, a in zip((1, 5, 25), special.values(), strict=True):
        a[0, :125] = values[np.arange(125) // step % 5]
    yield "NaN, inf and zeros", {key: store(a, dtype) for key, a in special.items()}


def _cases(dtype: str, stream: int, options: dict[str, Any], names: tuple[str, ...]) -> Iterator[Case]:
    for name, arrays in _arrays(dtype, stream):
        label = ", ".join([name, *[f"approximate={value}" for value in options.values()]])
        yield Case(label, {key: arrays[key] for key in names}, options)


_FORMS = [{"approximate": "none"}, {"approximate": "tanh"}]


def silu_mul(dtype: str) -> Iterator[Case]:
    """Gates and factors."""
    yield from _cases(dtype, _STREAM, {}, ("gate", "up"))


def silu_mul_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    yield from _cases(dtype, _STREAM + 100, {}, ("dy", "gate", "up"))


def gelu_mul(dtype: str) -> Iterator[Case]:
    """Gates and factors, in both forms."""
    for form in _FORMS:
        yield from _cases(dtype, _STREAM + 200, form, ("gate", "up"))


def gelu_mul_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    for form in _FORMS:
        yield from _cases(dtype, _STREAM + 300, form, ("dy", "gate", "up"))


def _packed(dtype: str, stream: int, options: dict[str, Any], names: tuple[str, ...]) -> Iterator[Case]:
    for case in _cases(dtype, stream, options, ("dy", "gate", "up")):
        arrays = {"dy": case.inputs["dy"], "x": np.concatenate([case.inputs["gate"], case.inputs["up"]], -1)}
        yield Case(case.name, {key: arrays[key] for key in names}, options)


def swiglu(dtype: str) -> Iterator[Case]:
    """Gates and factors in one array."""
    yield from _packed(dtype, _STREAM + 400, {}, ("x",))


def swiglu_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    yield from _packed(dtype, _STREAM + 500, {}, ("dy", "x"))


def geglu(dtype: str) -> Iterator[Case]:
    """Gates and factors in one array, in both forms."""
    for form in _FORMS:
        yield from _packed(dtype, _STREAM + 600, form, ("x",))


def geglu_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    for form in _FORMS:
        yield from _packed(dtype, _STREAM + 700, form, ("dy", "x"))
