"""The inputs that sparsemax and its gradient are verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Case, logits, normal, store
from isograd.ops.sparsemax import reference

_STREAM = 620


def sparsemax(dtype: str) -> Iterator[Case]:
    """Rows of logits, supports of every size, and ties."""
    for name, x, t in logits(dtype, _STREAM):
        yield Case(name, {"x": x})
        if name == "40 x 256":
            yield Case("all in the support", {"x": store(t.astype(np.float64) * 2.0**-12, dtype)})
            yield Case("first axis", {"x": x}, {"axis": 0})
    yield Case("ties", {"x": store(np.rint(normal((8, 60), _STREAM + 40)) / 4, dtype)})


def sparsemax_backward(dtype: str) -> Iterator[Case]:
    """Gradients of results, one of them expanded."""
    for name, x, t in logits(dtype, _STREAM + 50):
        yield Case(name, {"dy": t, "y": reference.sparsemax(x)})
        if name == "40 x 256":
            one = np.broadcast_to(t[:1, :1], t.shape)
            y = np.ascontiguousarray(reference.sparsemax(x, 0).T)
            yield Case("expanded dy, first axis", {"dy": one, "y": y.T}, {"axis": 0})
