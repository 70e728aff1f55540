"""The cases of cross entropy and linear cross entropy, and what must not change their bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Arrays, Case, Change, Suite, normal, store
from isograd.core.descriptor import Descriptor
from isograd.losses import cross_entropy_reference as reference
from isograd.losses import linear_reference
from isograd.losses.cross_entropy_plans import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyBackwardPlan,
    CrossEntropyDescriptor,
    CrossEntropyGradientDescriptor,
    CrossEntropyGradientPlan,
    CrossEntropyPlan,
)
from isograd.losses.linear_plans import (
    LinearCrossEntropyDescriptor,
    LinearCrossEntropyGradientDescriptor,
    LinearCrossEntropyGradientPlan,
    LinearCrossEntropyPlan,
)
from isograd.numerics import random

_IGNORED = -100


def _work(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def _targets(rows: tuple[int, ...], classes: int, stream: int) -> Array:
    """Class indices, one in eight of them ignored."""
    drawn = random.integers(rows, seed=2024, stream=stream)
    targets = np.asarray((drawn >> np.uint64(8)) % np.uint64(classes)).astype(np.int64)
    return np.where(drawn % np.uint64(8) == 0, _IGNORED, targets)


def _shares(shape: tuple[int, ...], axis: int, stream: int, dtype: str) -> Array:
    """Probabilities: integers over their exact sum."""
    whole = (random.integers(shape, seed=2024, stream=stream) >> np.uint64(44)).astype(np.int64) + 1
    return store(whole / whole.sum(axis=axis, keepdims=True).astype(np.float64), dtype)


def _case(
    name: str, logits: Array, dtype: str, stream: int, kind: str = "index", axis: int = 1, **options: Any
) -> Case:
    """A case of the gradient at once; the other operations take from it what they need."""
    axis %= logits.ndim
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    classes = logits.shape[axis]
    shares = kind == "probabilities"
    inputs = {
        "dlosses": store(normal(rows, stream + 1), dtype).astype(_work(dtype)),
        "logits": store(logits, dtype),
        "targets": _shares(logits.shape, axis, stream, dtype) if shares else _targets(rows, classes, stream),
    }
    if options.pop("weighted", False):
        u = random.uniform(classes, seed=2024, stream=stream, dtype=np.float64)
        inputs["weight"] = u.astype(np.float32).astype(_work(dtype))
    return Case(name, inputs, {"axis": axis} | options)


def _cases(dtype: str) -> Iterator[Case]:
    big = 65504.0 if dtype == "float16" else 3e38
    everything: dict[str, Any] = {"weighted": True, "label_smoothing": 0.125, "z_loss": 2.0**-10}
    for stream, shape in enumerate(((6, 1), (5, 31), (64, 256), (4, 5000), (1, 70_001)), 200):
        yield _case(f"{shape[0]} x {shape[1]}", 4 * normal(shape, stream), dtype, stream)
    yield _case("every option", 4 * normal((9, 300), 210), dtype, 210, **everything)
    yield _case("every option, long rows", 4 * normal((2, 5000), 211), dtype, 211, **everything)
    yield _case("probabilities", 4 * normal((9, 300), 212), dtype, 212, "probabilities")
    yield _case("probabilities, every option", 4 * normal((2, 5000), 213), dtype, 213, "probabilities", **everything)
    yield _case("first axis", 4 * normal((40, 70), 214), dtype, 214, axis=0)
    yield _case("middle axis", 4 * normal((3, 19, 600), 215), dtype, 215)
    yield _case("middle axis, every option", 4 * normal((3, 19, 40), 216), dtype, 216, **everything)
    yield _case("wide spread", 60 * normal((6, 1000), 217), dtype, 217)
    yield _case("offset", 1e4 + 4 * normal((6, 1000), 218), dtype, 218, z_loss=2.0**-20)
    special = normal((9, 50), 219).copy()
    special[range(6), [0, 24, 49, 0, 24, 49]] = [np.nan, np.inf, -np.inf, np.inf, np.nan, big]
    special[6], special[7, ::2], special[8] = -np.inf, -np.inf, 0.25
    yield _case("special values", special, dtype, 219)


def _forward_cases(dtype: str) -> Iterator[Case]:
    for case in _cases(dtype):
        inputs = {name: array for name, array in case.inputs.items() if name != "dlosses"}
        yield Case(case.name, inputs, case.options)


def _backward_cases(dtype: str) -> Iterator[Case]:
    for case, without in zip(_cases(dtype), _forward_cases(dtype), strict=True):
        arguments: dict[str, Any] = {**without.inputs, **case.options}
        _, state = reference.cross_entropy(**arguments)
        yield Case(case.name, {**case.inputs, "state": state}, case.options)


# --- invariances -----------------------------------------------------------------------------------------------------
def _changed(case: Case, rows: Callable[[Array], Array], full: Callable[[Array], Array], axis: int) -> Case:
    """`rows` is applied to what has an element a row, `full` to what has a class axis."""

    def change(name: str, a: Array) -> Array:
        if name == "weight":
            return a
        if name == "state":
            return np.stack([rows(part) for part in a])
        by_class = name == "logits" or (name == "targets" and a.ndim == case.inputs["logits"].ndim)
        return full(a) if by_class else rows(a)

    inputs = {name: change(name, a) for name, a in case.inputs.items()}
    return Case(case.name, inputs, {**case.options, "axis": axis})


def _results(kinds: tuple[str, ...], rows: Callable[[Array], Array], full: Callable[[Array], Array]) -> Any:
    """The same for the results, which are of these kinds: "rows", "full" or "state"."""

    def change(results: Arrays) -> Arrays:
        pairs = zip(kinds, results, strict=True)
        by_kind: dict[str, Callable[[Array], Array]] = {"rows": rows, "full": full}
        by_kind["state"] = lambda a: np.stack([rows(part) for part in a])
        return tuple(by_kind[kind](a) for kind, a in pairs)

    return change


def _batch(kinds: tuple[str, ...], case: Case) -> Iterator[Change]:
    """Single rows, and the rows cut in two."""
    axis = int(case.options["axis"])
    x = case.inputs["logits"]
    outer = np.moveaxis(x, axis, -1).shape[:-1]
    indices: list[Any] = [index for _, index in zip(range(8), np.ndindex(outer), strict=False)]
    indices += [slice(outer[0] // 2), slice(outer[0] // 2, None)] if outer[0] > 1 else []
    for index in indices:

        def rows(a: Array, index: Any = index) -> Array:
            return np.asarray(a[index])

        def full(a: Array, index: Any = index) -> Array:
            return np.asarray(np.moveaxis(a, axis, -1)[index])

        yield Change(_changed(case, rows, full, -1), _results(kinds, rows, full))


def _order(kinds: tuple[str, ...], case: Case) -> Iterator[Change]:
    """The classes shuffled and reversed, the targets with them."""
    axis = int(case.options["axis"])
    x = case.inputs["logits"]
    for order in (random.permutation(x.shape[axis], seed=1), np.arange(x.shape[axis])[::-1]):

        def full(a: Array, order: Array = order) -> Array:
            return np.take(a, order, axis)

        changed = _changed(case, lambda a: a, full, axis)
        inputs = dict(changed.inputs)
        if inputs["targets"].ndim < x.ndim:
            place, targets = np.argsort(order), inputs["targets"]
            inputs["targets"] = np.where(targets == _IGNORED, targets, place[np.maximum(targets, 0)])
        if "weight" in inputs:
            inputs["weight"] = inputs["weight"][order]
        yield Change(Case(case.name, inputs, changed.options), _results(kinds, lambda a: a, full))


def _layout(kinds: tuple[str, ...], case: Case) -> Iterator[Change]:
    """The same values with the classes innermost, outermost, and in reversed memory."""
    axis = int(case.options["axis"])

    def innermost(a: Array) -> Array:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, axis, -1)), -1, axis)

    def outermost(a: Array) -> Array:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, axis, 0)), 0, axis)

    def backwards(a: Array) -> Array:
        step = (slice(None, None, -1),) * a.ndim
        return np.ascontiguousarray(a[step])[step]

    for full in (innermost, outermost, backwards):
        yield Change(_changed(case, lambda a: a, full, axis))


def _padding(kinds: tuple[str, ...], case: Case) -> Iterator[Change]:
    """More classes that no target names; smoothing would reach them."""
    axis = int(case.options["axis"])
    x = case.inputs["logits"]
    if case.options.get("label_smoothing") or case.inputs["targets"].ndim == x.ndim:
        return
    shape = (*x.shape[:axis], 37, *x.shape[axis + 1 :])
    inputs = {**case.inputs, "logits": np.concatenate([x, np.full(shape, -np.inf, x.dtype)], axis=axis)}
    if "weight" in inputs:
        inputs["weight"] = np.concatenate([inputs["weight"], np.ones(37, inputs["weight"].dtype)])

    def without(a: Array) -> Array:
        return np.take(a, range(x.shape[axis]), axis)

    yield Change(Case(case.name, inputs, case.options), seen=_results(kinds, lambda a: a, without))


def _changes(*kinds: str) -> dict[str, Callable[[Case], Iterator[Change]]]:
    checks = {"batch": _batch, "order": _order, "layout": _layout, "padding": _padding}
    return {name: functools.partial(check, kinds) for name, check in checks.items()}


def _descriptor(kind: Callable[..., Descriptor]) -> Callable[[Case, str], Descriptor]:
    def make(case: Case, dtype: str) -> Descriptor:
        targets = case.inputs["targets"].dtype
        target_dtype = targets.name if targets.kind in "iu" else dtype
        return kind(case.inputs["logits"].shape, dtype, target_dtype, weighted="weight" in case.inputs, **case.options)

    return make


# --- the linear layer ------------------------------------------------------------------------------------------------
def _linear_cases(dtype: str) -> Iterator[Case]:
    for stream, (rows, features, classes) in enumerate(((5, 1, 3), (9, 40, 100), (20, 16, 1000)), 240):
        hidden, weight = normal((rows, features), stream), normal((classes, features), stream + 10)
        inputs = {
            "dlosses": store(normal((rows,), stream + 20), dtype).astype(_work(dtype)),
            "hidden": store(hidden, dtype),
            "weight": store(weight, dtype),
            "targets": _targets((rows,), classes, stream),
        }
        yield Case(f"{rows} x {features} x {classes}", inputs)
        inputs = {**inputs, "bias": store(normal((classes,), stream + 30), dtype)}
        u = random.uniform(classes, seed=2024, stream=stream, dtype=np.float64)
        inputs["class_weight"] = u.astype(np.float32).astype(_work(dtype))
        yield Case(
            f"{rows} x {features} x {classes}, every option", inputs, {"label_smoothing": 0.125, "z_loss": 2.0**-10}
        )


def _linear_forward_cases(dtype: str) -> Iterator[Case]:
    for case in _linear_cases(dtype):
        yield Case(case.name, {k: v for k, v in case.inputs.items() if k != "dlosses"}, case.options)


def _linear_descriptor(kind: Callable[..., Descriptor]) -> Callable[[Case, str], Descriptor]:
    def make(case: Case, dtype: str) -> Descriptor:
        rows, features = case.inputs["hidden"].shape
        fields = (rows, features, len(case.inputs["weight"]), dtype, case.inputs["targets"].dtype.name)
        flags = {"biased": "bias" in case.inputs, "weighted": "class_weight" in case.inputs}
        return kind(*fields, **flags, **case.options)

    return make


def _linear_batch(case: Case) -> Iterator[Change]:
    """The rows cut in two; the gradients of weight and bias are sums over the rows and differ."""
    rows = len(case.inputs["hidden"])
    for part in (slice(rows // 2), slice(rows // 2, None)):
        names = ("hidden", "targets", "dlosses")
        inputs = {name: a[part] if name in names else a for name, a in case.inputs.items()}

        def expected(results: Arrays, part: slice = part) -> Arrays:
            return tuple(a[part] for a in results[:2])

        yield Change(Case(case.name, inputs, case.options), expected, lambda results: results[:2])


def _linear_order(case: Case) -> Iterator[Change]:
    """The rows in another order."""
    order = random.permutation(len(case.inputs["hidden"]), seed=2)
    names = ("hidden", "targets", "dlosses")
    inputs = {name: a[order] if name in names else a for name, a in case.inputs.items()}
    yield Change(
        Case(case.name, inputs, case.options),
        lambda results: (*(a[order] for a in results[:2]), *results[2:]),
    )


_LINEAR_CHANGES = {"batch": _linear_batch, "order": _linear_order}
SUITES: dict[str, Suite] = {
    "cross_entropy": Suite(
        CrossEntropyPlan,
        _descriptor(CrossEntropyDescriptor),
        reference.cross_entropy,
        reference.oracle_cross_entropy,
        _forward_cases,
        _changes("rows", "state"),
    ),
    "cross_entropy_backward": Suite(
        CrossEntropyBackwardPlan,
        _descriptor(CrossEntropyBackwardDescriptor),
        reference.cross_entropy_backward,
        reference.oracle_cross_entropy_backward,
        _backward_cases,
        _changes("full"),
    ),
    "cross_entropy_gradient": Suite(
        CrossEntropyGradientPlan,
        _descriptor(CrossEntropyGradientDescriptor),
        reference.cross_entropy_gradient,
        reference.oracle_cross_entropy_gradient,
        _cases,
        _changes("rows", "full"),
    ),
    "linear_cross_entropy": Suite(
        LinearCrossEntropyPlan,
        _linear_descriptor(LinearCrossEntropyDescriptor),
        linear_reference.linear_cross_entropy,
        linear_reference.oracle_linear_cross_entropy,
        _linear_forward_cases,
        _LINEAR_CHANGES,
    ),
    "linear_cross_entropy_gradient": Suite(
        LinearCrossEntropyGradientPlan,
        _linear_descriptor(LinearCrossEntropyGradientDescriptor),
        linear_reference.linear_cross_entropy_gradient,
        linear_reference.oracle_linear_cross_entropy_gradient,
        _linear_cases,
        _LINEAR_CHANGES,
    ),
}
