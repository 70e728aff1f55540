"""The inputs that the softmax family is verified with."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from isograd.core.cases import Array, Case, normal, store
from isograd.numerics import random
from isograd.numerics import reference as ref

# (rows, columns) of the ordinary cases: one element, lengths around block sizes, rows that are cut into blocks, and a
# long row.
ORDINARY = ((6, 1), (6, 2), (5, 31), (64, 256), (8, 1000), (4, 5000), (2, 70_001))
_BIG = {"float16": 65504.0, "bfloat16": 3.0e38, "float32": 3.0e38, "float64": 1.7e308}
_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}


@functools.lru_cache(maxsize=64)
def _weights(shape: tuple[int, ...], axis: int, stream: int) -> Array:
    """Rows of probabilities that span some ten orders of magnitude; integers over their exact sum."""
    u = random.uniform(shape, seed=2024, stream=stream, dtype=np.float64)
    power = u * u
    power = power * power
    power = power * power
    whole = np.rint(power * 2.0**40).astype(np.int64) + 1
    values = np.asarray(whole / whole.sum(axis=axis, keepdims=True).astype(np.float64))
    values.setflags(write=False)
    return values


def _one_hot(shape: tuple[int, ...], inside: float, outside: float) -> Array:
    """`inside` at one place of each row, `outside` elsewhere."""
    x = np.full(shape, outside)
    x[np.arange(shape[0]), (np.arange(shape[0]) * 7 + 3) % shape[1]] = inside
    return x


def _alternating(shape: tuple[int, ...]) -> Array:
    return np.where(np.arange(shape[-1]) % 2 == 0, np.ones(shape), -1.0)


def _rows(*rows: list[float]) -> Array:
    return np.array(rows, np.float64)


# Other axes and strides: name, shape in C order, the axis there, the view of it, and the axis of the view.
LAYOUTS: tuple[tuple[str, tuple[int, ...], int, Callable[[Array], Array], int], ...] = (
    ("first axis", (300, 70), 0, lambda a: a, 0),
    ("middle axis", (5, 33, 40), 1, lambda a: a, 1),
    ("transposed", (96, 40), 0, lambda a: a.T, -1),
    ("reversed", (12, 200), 1, lambda a: a[::-1, ::-1], -1),
    ("every third element", (12, 600), 1, lambda a: a[:, ::3], -1),
    ("four dimensions, permuted", (4, 9, 5, 16), 1, lambda a: a.transpose(2, 0, 3, 1), -1),
)


def _forward_cases(dtype: str) -> Iterator[Case]:
    big, tiny = _BIG[dtype], _TINY[dtype]

    def case(name: str, x: Array) -> Case:
        return Case(name, {"x": store(x, dtype)})

    for stream, shape in enumerate(ORDINARY):
        yield case(f"{shape[0]} x {shape[1]}", 4 * normal(shape, stream))
    yield case("wide spread", 60 * normal((6, 3000), 20))
    yield case("offset 1e4", 1e4 + 4 * normal((6, 1000), 21))
    yield case("offset -1e7", (-6e4 if dtype == "float16" else -1e7) + 4 * normal((6, 1000), 22))
    yield case("one dominant element", normal((4, 5000), 23) + _one_hot((4, 5000), 24, 0))
    yield case("one dominant element, far away", normal((4, 5000), 23) + _one_hot((4, 5000), 90, 0))
    yield case("equal elements", np.full((2, 5000), 0.3))
    yield case("equal elements, long row", np.full((1, 70_001), -1.75))
    yield case("difference overflows", big * _alternating((3, 40)) + normal((3, 40), 24))
    yield case("subnormal", tiny * np.rint(200 * normal((4, 100), 25)))
    some = np.where(normal((3, 50), 26) > 0, -np.inf, normal((3, 50), 26))
    yield case("-inf", np.concatenate([np.full((1, 50), -np.inf), _one_hot((4, 50), 2.5, -np.inf), some]))
    special = normal((9, 50), 27).copy()
    special[range(6), [0, 24, 49, 0, 24, 49]] = [np.nan, np.nan, np.nan, np.inf, np.inf, np.inf]
    special[6, :2] = [np.nan, np.inf]
    special[7], special[8] = -np.inf, np.inf
    special[7, 30] = np.inf
    yield case("NaN and inf", special)
    for stream, (name, base, _, view, axis) in enumerate(LAYOUTS, 30):
        yield Case(name, {"x": view(store(4 * normal(base, stream), dtype))}, {"axis": axis})


def _backward_cases(log: bool, dtype: str) -> Iterator[Case]:
    big, tiny = _BIG[dtype], _TINY[dtype]

    def results(y: Array) -> Array:
        """Probabilities or their logarithms."""
        return store(ref.log(y) if log else y, dtype)

    def case(name: str, dy: Array, y: Array) -> Case:
        return Case(name, {"dy": store(dy, dtype), "y": results(y)})

    for stream, shape in enumerate(ORDINARY):
        yield case(f"{shape[0]} x {shape[1]}", normal(shape, 50 + stream), _weights(shape, 1, stream))
    shape = (4, 3000)
    dy, y = normal(shape, 60), _weights(shape, 1, 20)
    yield case("large gradient", 1e4 * dy, y)
    yield case("offset of the gradient", 1e4 + dy, y)
    # Every term is as large as the others, and they cancel but for their rounding.
    yield case("cancellation", 1e4 * _alternating(shape) + dy, np.full(shape, 1 / 3000))
    yield case("cancellation of unlike factors", _alternating(shape) / np.maximum(y, 1e-4), y)
    peak = 1 - 2.0**-12
    yield case("one dominant probability", dy, _one_hot(shape, peak, (1 - peak) / 2999))
    yield case("equal elements", np.full(shape, 0.3), np.full(shape, 1 / 3000))
    yield case("probabilities underflow", dy, y * 2.0**-140)
    yield case("sum overflows", big * np.where(normal((3, 40), 61) > 0.5, -0.9, 0.9), np.full((3, 40), 0.9))
    yield case("subnormal", tiny * np.rint(200 * normal((4, 100), 62)), _weights((4, 100), 1, 21))
    special = normal((7, 50), 63).copy()
    special[range(4), [0, 24, 49, 10]] = [np.nan, np.nan, np.inf, -np.inf]
    special[4, :2], special[5, :2], special[6] = [np.inf, -np.inf], [np.inf, np.inf], np.nan
    yield case("NaN and inf in dy", special, _weights((7, 50), 1, 22))
    masked = _weights((6, 50), 1, 23).copy()
    masked[range(3), [0, 24, 49]], masked[3, 5], masked[4, 10:20], masked[5] = np.nan, np.inf, 0, 0
    yield case("NaN, inf and zero in y", normal((6, 50), 64), masked)
    one = store(normal((40, 1), 65), dtype)
    yield Case("expanded dy", {"dy": np.broadcast_to(one, (40, 90)), "y": results(_weights((40, 90), 1, 24))})
    scalar = np.broadcast_to(store(np.array(0.1), dtype), (40, 90))
    yield Case("dy of stride zero, first axis", {"dy": scalar, "y": results(_weights((40, 90), 0, 25))}, {"axis": 0})
    for stream, (name, base, base_axis, view, axis) in enumerate(LAYOUTS, 70):
        probabilities = view(results(_weights(base, base_axis, stream)))
        yield Case(name, {"dy": view(store(normal(base, stream), dtype)), "y": probabilities}, {"axis": axis})
        if name in ("transposed", "reversed"):
            contiguous = store(normal(probabilities.shape, stream), dtype)
            yield Case(f"{name} y, contiguous dy", {"dy": contiguous, "y": probabilities}, {"axis": axis})


def softmax(dtype: str) -> Iterator[Case]:
    """Rows of logits that hurt."""
    return _forward_cases(dtype)


def log_softmax(dtype: str) -> Iterator[Case]:
    """The same."""
    return _forward_cases(dtype)


def softmax_backward(dtype: str) -> Iterator[Case]:
    """Gradients of probabilities."""
    return _backward_cases(False, dtype)


def log_softmax_backward(dtype: str) -> Iterator[Case]:
    """Gradients of logarithms of probabilities."""
    return _backward_cases(True, dtype)
