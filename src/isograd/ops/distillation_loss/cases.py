"""The inputs that distillation_loss and its gradient are verified with, and how their classes are reordered."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Case, Change, every, logits, normal, store, unchanged
from isograd.numerics import random
from isograd.numerics import reference as ref
from isograd.numerics.storage import compute_dtype
from isograd.ops.softmax import reference as softmax

_STREAM = 460


def _named(teacher: Array, k: int, dtype: str, index: Any) -> tuple[Array, Array]:
    """A teacher's log-probabilities at k classes: every third one, wrapped around."""
    log_p = softmax.log_softmax(ref.widen(teacher))
    columns = (np.arange(teacher.shape[0])[:, None] + 3 * np.arange(k)) % teacher.shape[1]
    return store(np.take_along_axis(log_p, columns, 1).astype(np.float64), dtype), columns.astype(index)


def distillation_loss(dtype: str) -> Iterator[Case]:
    """From all of the teacher's logits, and from some classes that it names, by every reduction."""
    for i, (name, x, t) in enumerate(logits(dtype, _STREAM)):
        options = {"temperature": (1.0, 2.0, 0.7)[i % 3], "reduction": ("none", "batchmean", "mean", "sum")[i % 4]}
        yield Case(name, {"student": x, "teacher": t}, options)
        k = 1 if x.shape[1] < 16 else 5 if i % 2 else 9
        kept, indices = _named(t, k, dtype, (np.int32, np.int64, np.uint32)[i % 3])
        yield Case(f"{name}, {k} named", {"student": x, "teacher": kept, "indices": indices}, options)


def distillation_loss_backward(dtype: str) -> Iterator[Case]:
    """The same from gradients of the loss."""
    for i, case in enumerate(distillation_loss(dtype)):
        shape = case.inputs["student"].shape[:-1] if case.options["reduction"] == "none" else ()
        dloss = store(np.asarray(normal((1, *shape), _STREAM + 40 + i // 2)[0]), compute_dtype(dtype))
        yield Case(case.name, {"dloss": dloss, **case.inputs}, case.options)


def distillation_loss_order(case: Case) -> Iterator[Change]:
    """The classes, and the teacher's named ones, in another order."""
    n = case.inputs["student"].shape[-1]
    order = random.permutation(n, seed=n)
    inputs = dict(case.inputs)
    inputs["student"] = np.take(inputs["student"], order, -1)
    if "indices" in inputs:
        k = inputs["indices"].shape[-1]
        among, inverse = random.permutation(k, seed=k), np.argsort(order)
        inputs["indices"] = inverse.astype(inputs["indices"].dtype)[inputs["indices"].astype(np.int64)][:, among]
        inputs["teacher"] = inputs["teacher"][:, among]
    else:
        inputs["teacher"] = np.take(inputs["teacher"], order, -1)
    reordered = every(lambda r: np.take(r, order, -1)) if "dloss" in inputs else unchanged
    yield Change(Case(case.name, inputs, case.options), reordered)


distillation_loss_backward_order = distillation_loss_order
