"""The cases of divergences with their gradients, and what must not change their bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isograd.core.cases import (
    Array,
    Case,
    Change,
    Suite,
    each,
    every,
    layout,
    logits,
    normal,
    store,
    unchanged,
)
from isograd.losses import divergence_plans as divergence
from isograd.losses import divergence_reference
from isograd.numerics import random
from isograd.numerics import reference as ref
from isograd.numerics.storage import compute_dtype
from isograd.plan import Descriptor

_STREAM = 400  # of this family's inputs


def _log_softmax(x: Array) -> Array:
    """Log-probabilities in the work type; the family's reference has the same bits on every machine."""
    from isograd.ops.softmax import reference

    return reference.log_softmax(ref.widen(x))


def _exp(x: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return ref.narrow(ref.exp(x), np.dtype(ref.BFLOAT16 if dtype == "bfloat16" else dtype))


def _upstream(shape: tuple[int, ...], dtype: str, stream: int) -> Array:
    return store(np.asarray(normal((1, *shape), stream)[0]), compute_dtype(dtype))


# --- divergences -----------------------------------------------------------------------------------------------------
def _named(teacher: Array, k: int, dtype: str, index: Any) -> tuple[Array, Array]:
    """A teacher's log-probabilities at k classes: every third one, wrapped around."""
    log_p = _log_softmax(teacher)
    columns = (np.arange(teacher.shape[0])[:, None] + 3 * np.arange(k)) % teacher.shape[1]
    return store(np.take_along_axis(log_p, columns, 1).astype(np.float64), dtype), columns.astype(index)


def _distillation_cases(backward: bool, dtype: str) -> Iterator[Case]:
    for i, (name, x, t) in enumerate(logits(dtype, _STREAM + 60)):
        options = {"temperature": (1.0, 2.0, 0.7)[i % 3], "reduction": ("none", "batchmean", "mean", "sum")[i % 4]}
        g = _upstream(x.shape[:-1] if options["reduction"] == "none" else (), dtype, _STREAM + 100 + i)
        before = {"dloss": g} if backward else {}
        yield Case(name, {**before, "student": x, "teacher": t}, options)
        k = 1 if x.shape[1] < 16 else 5 if i % 2 else 9
        kept, indices = _named(t, k, dtype, (np.int32, np.int64, np.uint32)[i % 3])
        yield Case(f"{name}, {k} named", {**before, "student": x, "teacher": kept, "indices": indices}, options)


def _distillation_descriptor(type_: Callable[..., Descriptor], case: Case, dtype: str) -> Descriptor:
    indices = case.inputs.get("indices")
    named = {} if indices is None else {"classes": indices.shape[-1], "index_dtype": indices.dtype.name}
    return type_(case.inputs["student"].shape, dtype, None, **case.options, **named)


# --- invariances -----------------------------------------------------------------------------------------------------
def _class_order(case: Case) -> Iterator[Change]:
    """The classes, and the teacher's named ones, in another order."""
    backward = "dloss" in case.inputs
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
    changed = Case(case.name, inputs, case.options)
    yield Change(changed, every(lambda r: np.take(r, order, -1)) if backward else unchanged)


def _class_batch(case: Case) -> Iterator[Change]:
    """The first and the last rows alone, where every row has a result of its own."""
    if case.options["reduction"] != "none":
        return
    half = case.inputs["student"].shape[0] // 2
    for part in (slice(half), slice(half, None), slice(1)):

        def cut(a: Array, part: slice = part) -> Array:
            return a[part]

        yield Change(each(case, cut), every(cut))


def _suite(
    plan: Any, type_: Any, module: Any, operation: str, describe: Any, cases: Any, changes: dict[str, Any]
) -> Suite:
    return Suite(
        plan=plan,
        descriptor=functools.partial(describe, type_) if type_ is not None else describe,
        reference=getattr(module, operation),
        oracle=getattr(module, f"oracle_{operation}"),
        cases=cases,
        changes=changes,
    )


_CLASSES = {"order": _class_order, "batch": _class_batch, "layout": layout}
_d, _dr = divergence, divergence_reference

SUITES: dict[str, Suite] = {
    "distillation_loss": _suite(
        _d.DistillationLossPlan,
        _d.DistillationLossDescriptor,
        _dr,
        "distillation_loss",
        _distillation_descriptor,
        functools.partial(_distillation_cases, False),
        _CLASSES,
    ),
    "distillation_loss_backward": _suite(
        _d.DistillationLossBackwardPlan,
        _d.DistillationLossBackwardDescriptor,
        _dr,
        "distillation_loss_backward",
        _distillation_descriptor,
        functools.partial(_distillation_cases, True),
        _CLASSES,
    ),
}
