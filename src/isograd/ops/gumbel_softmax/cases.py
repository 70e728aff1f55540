"""The inputs that gumbel_softmax and its gradient are verified with."""

from collections.abc import Iterator

import numpy as np

from isograd.core.cases import Case, logits
from isograd.numerics import reference as ref
from isograd.ops.softmax import reference as softmax

_STREAM = 540


def gumbel_softmax(dtype: str) -> Iterator[Case]:
    """Soft and hard, by several temperatures, seeds and offsets, along other axes."""
    for i, (name, x, _) in enumerate(logits(dtype, _STREAM)):
        options = {"tau": (1.0, 0.5, 3.7)[i % 3], "hard": i % 4 == 3, "seed": 7 * i, "offset": (0, 5, 2**33)[i % 3]}
        yield Case(name, {"logits": x}, options)
        if name == "40 x 256":
            yield Case("first axis", {"logits": x}, {**options, "axis": 0})
            yield Case("transposed", {"logits": x.T}, options)


def gumbel_softmax_backward(dtype: str) -> Iterator[Case]:
    """Gradients of a distribution that the logits have."""
    for i, (name, x, t) in enumerate(logits(dtype, _STREAM + 40)):
        with np.errstate(all="ignore"):
            y = ref.narrow(ref.exp(softmax.log_softmax(ref.widen(x))), x.dtype)
        yield Case(name, {"dy": t, "y": y}, {"tau": (1.0, 0.5, 3.7)[i % 3]})
        if name == "40 x 256":
            yield Case("first axis", {"dy": t.T, "y": y.T}, {"tau": 0.3, "axis": 0})
