"""The inputs that layernorm and its gradient are verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Array, Case, normal, store
from isograd.ops.layernorm import reference

_STREAM = 2400


def _rows(dtype: str, stream: int) -> Iterator[tuple[str, Array, Array, Array, Array]]:
    """Name, rows, gradients, weight, bias: rows that hurt."""

    def stored(name: str, x: Array, t: Array, w: Array, b: Array) -> tuple[str, Array, Array, Array, Array]:
        return name, store(x, dtype), store(t, dtype), store(w, dtype), store(b, dtype)

    for i, shape in enumerate(((6, 1), (5, 31), (40, 256), (3, 5000), (2, 3, 48))):
        x, t = normal(shape, stream + 4 * i), normal(shape, stream + 4 * i + 1)
        w, b = normal(shape[-1:], stream + 4 * i + 2), normal(shape[-1:], stream + 4 * i + 3)
        name = " x ".join(map(str, shape))
        yield stored(name, x, t, 1 + w / 8, b / 8)
    x, t = normal((4, 300), stream + 30), normal((4, 300), stream + 31)
    w, b = normal((300,), stream + 32), normal((300,), stream + 33)
    large = {"float16": 2.0**10, "float64": 2.0**500}.get(dtype, 2.0**58)
    tiny = {"float16": 2.0**-20, "float64": 2.0**-1030}.get(dtype, 2.0**-130)
    for name, factor in (("large", large), ("squares overflow", 32 * large * large), ("subnormal", tiny)):
        yield stored(name, x * factor, t, w, b)
    yield stored("far from zero", 1000 + x, t, w, b)
    channel = np.where(np.arange(300) == 17, 100.0, 1.0)
    yield stored("one large channel", x * channel, t, w / channel, b)
    constant = x.copy()
    constant[0], constant[1], constant[2, ::2], constant[3] = 0.0, 1.0, -0.0, 0.1
    yield stored("constant rows", constant, t, w, b)
    special = x.copy()
    special[0, 3], special[1, 299], special[2, 0] = np.nan, np.inf, -np.inf
    yield stored("NaN and inf", special, t, w, b)


def layernorm(dtype: str) -> Iterator[Case]:
    """With and without weight and bias, by several eps, along other axes."""
    for i, (name, x, _, weight, bias) in enumerate(_rows(dtype, _STREAM)):
        eps = {"eps": (1e-5, 1e-6, 0.0)[i % 3]}
        yield Case(name, {"x": x, "weight": weight, "bias": bias}, eps)
        if i % 2:
            yield Case(f"{name}, no weight", {"x": x, "bias": bias}, eps)
        if name == "40 x 256":
            yield Case("alone", {"x": x}, eps)
            across = {"weight": np.ascontiguousarray(x[:, 3]), "bias": np.ascontiguousarray(x[:, 4])}
            yield Case("first axis", {"x": x, **across}, {"axis": 0})


def layernorm_backward(dtype: str) -> Iterator[Case]:
    """From the forward's mean and rstd; gradients of weight and bias with and without a weight."""
    for i, (name, x, t, weight, _) in enumerate(_rows(dtype, _STREAM + 100)):
        _, mean, rstd = reference.layernorm(x)
        inputs = {"dy": t, "x": x, "mean": mean, "rstd": rstd}
        yield Case(name, {**inputs, "weight": weight}, {"dweight": True, "dbias": True})
        if i % 2:
            yield Case(f"{name}, dx alone", inputs)
        if name == "40 x 256":
            yield Case("the bias alone", inputs, {"dbias": True})
            one = np.broadcast_to(t[:1, :1], t.shape)
            _, mean, rstd = reference.layernorm(x, axis=0)
            inputs = {"dy": one, "x": x, "mean": mean, "rstd": rstd}
            yield Case("expanded dy, first axis", inputs, {"axis": 0, "dweight": True, "dbias": True})


def add_layernorm(dtype: str) -> Iterator[Case]:
    """With and without weight and bias."""
    for i, (name, x, t, weight, bias) in enumerate(_rows(dtype, _STREAM + 200)):
        yield Case(name, {"x": x, "residual": t, "weight": weight, "bias": bias})
        if i % 2:
            yield Case(f"{name}, no weight", {"x": x, "residual": t}, {"eps": 0.0})


def add_layernorm_backward(dtype: str) -> Iterator[Case]:
    """With and without a gradient of the sum."""
    for i, (name, x, t, weight, _) in enumerate(_rows(dtype, _STREAM + 300)):
        _, summed, mean, rstd = reference.add_layernorm(x, t)
        inputs = {"dy": t, "summed": summed, "mean": mean, "rstd": rstd, "weight": weight}
        yield Case(name, {**inputs, "dsummed": x}, {"dweight": True, "dbias": True})
        if i % 2:
            yield Case(f"{name}, dx alone", inputs)
