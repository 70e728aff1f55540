"""The inputs that rmsnorm and its gradient are verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Array, Case, normal, store
from isograd.ops.rmsnorm import reference

_STREAM = 2000


def _rows(dtype: str, stream: int) -> Iterator[tuple[str, Array, Array, Array]]:
    """Name, rows, gradients, weight: rows that hurt."""
    shapes = ((6, 1), (5, 31), (40, 256), (3, 5000), (2, 3, 48))
    for i, shape in enumerate(shapes):
        x, t, w = (
            normal(shape, stream + 3 * i),
            normal(shape, stream + 3 * i + 1),
            normal(shape[-1:], stream + 3 * i + 2),
        )
        yield " x ".join(map(str, shape)), store(x, dtype), store(t, dtype), store(1 + w / 8, dtype)
    x, t, w = normal((4, 300), stream + 20), normal((4, 300), stream + 21), normal((300,), stream + 22)
    large = {"float16": 2.0**10, "float64": 2.0**500}.get(dtype, 2.0**58)
    tiny = {"float16": 2.0**-20, "float64": 2.0**-1030}.get(dtype, 2.0**-130)
    for name, factor in (("large", large), ("subnormal", tiny), ("small squares", np.sqrt(tiny))):
        yield name, store(x * factor, dtype), store(t, dtype), store(w, dtype)
    channel = np.where(np.arange(300) == 17, 100.0, 1.0)
    yield "one large channel", store(x * channel, dtype), store(t, dtype), store(w / channel, dtype)
    zeros = x.copy()
    zeros[1], zeros[2, ::2] = 0.0, -0.0
    yield "zeros", store(zeros, dtype), store(t, dtype), store(w, dtype)
    special = x.copy()
    special[0, 3], special[1, 299], special[2, 0] = np.nan, np.inf, -np.inf
    yield "NaN and inf", store(special, dtype), store(t, dtype), store(w, dtype)


def rmsnorm(dtype: str) -> Iterator[Case]:
    """With and without a weight, by several eps, along other axes."""
    for i, (name, x, _, weight) in enumerate(_rows(dtype, _STREAM)):
        eps = {"eps": (1e-6, 1e-5, 0.0)[i % 3]}
        yield Case(name, {"x": x, "weight": weight}, eps)
        if i % 2:
            yield Case(f"{name}, no weight", {"x": x}, eps)
        if name == "40 x 256":
            yield Case("first axis", {"x": x, "weight": np.ascontiguousarray(x[:, 3])}, {"axis": 0})


def rmsnorm_backward(dtype: str) -> Iterator[Case]:
    """From the forward's rstd; the weight's gradient with and without a weight."""
    for i, (name, x, t, weight) in enumerate(_rows(dtype, _STREAM + 100)):
        _, rstd = reference.rmsnorm(x)
        inputs = {"dy": t, "x": x, "rstd": rstd}
        yield Case(name, {**inputs, "weight": weight}, {"dweight": True})
        if i % 2:
            yield Case(f"{name}, dx alone", inputs)
        if name == "40 x 256":
            one = np.broadcast_to(t[:1, :1], t.shape)
            _, across = reference.rmsnorm(x, None, 0)
            yield Case("expanded dy, first axis", {"dy": one, "x": x, "rstd": across}, {"axis": 0, "dweight": True})


def add_rmsnorm(dtype: str) -> Iterator[Case]:
    """With and without a weight."""
    for i, (name, x, t, weight) in enumerate(_rows(dtype, _STREAM + 200)):
        yield Case(name, {"x": x, "residual": t, "weight": weight})
        if i % 2:
            yield Case(f"{name}, no weight", {"x": x, "residual": t}, {"eps": 0.0})


def add_rmsnorm_backward(dtype: str) -> Iterator[Case]:
    """With and without a gradient of the sum."""
    for i, (name, x, t, weight) in enumerate(_rows(dtype, _STREAM + 300)):
        _, summed, rstd = reference.add_rmsnorm(x, t)
        inputs = {"dy": t, "summed": summed, "rstd": rstd, "weight": weight}
        yield Case(name, {**inputs, "dsummed": x}, {"dweight": True})
        if i % 2:
            yield Case(f"{name}, dx alone", inputs)
