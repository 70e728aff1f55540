"""The inputs that kl_div and its gradient are verified with."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Case, logits, normal, store
from isograd.numerics import reference as ref
from isograd.numerics.storage import compute_dtype
from isograd.ops.softmax import reference as softmax

_STREAM = 401
_OPTIONS = [("mean", False), ("sum", True), ("batchmean", False), ("none", True), ("none", False)]


def _pairs(dtype: str) -> Iterator[tuple[str, dict[str, Array], dict[str, Any]]]:
    """Name, inputs and options: distributions of logits, by every reduction."""
    for i, (name, x, t) in enumerate(logits(dtype, _STREAM)):
        reduction, log_target = _OPTIONS[i % 5]
        log_q, log_p = (softmax.log_softmax(ref.widen(a)) for a in (x, t))
        with np.errstate(all="ignore"):
            target = ref.narrow(log_p if log_target else ref.exp(log_p), x.dtype)
        options = {"reduction": reduction, "log_target": log_target}
        yield name, {"input": ref.narrow(log_q, x.dtype), "target": target}, options


def kl_div(dtype: str) -> Iterator[Case]:
    """Losses, one of them of transposed arrays."""
    for name, inputs, options in _pairs(dtype):
        yield Case(name, inputs, options)
        if name == "40 x 256":
            yield Case(f"{name}, transposed", {key: a.T for key, a in inputs.items()}, options)


def kl_div_backward(dtype: str) -> Iterator[Case]:
    """Gradients of both arguments."""
    for i, (name, inputs, options) in enumerate(_pairs(dtype)):
        shape = inputs["input"].shape if options["reduction"] == "none" else ()
        dloss = store(np.asarray(normal((1, *shape), _STREAM + 39 + i)[0]), compute_dtype(dtype))
        yield Case(name, {"dloss": dloss, **inputs}, options | {"wrt": "target" if i % 2 else "input"})
