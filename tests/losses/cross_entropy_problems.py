"""Problems of cross entropy that several tests are made of, and how they are run by plan and by definition."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import isograd as ig
from isograd.losses import cross_entropy_reference as reference

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
KINDS = ("hard", "smooth", "probabilities")


class Problem(NamedTuple):
    """Arguments of cross entropy; `options` are those of the reference."""

    logits: Any
    targets: Any
    weight: Any
    dlosses: Any
    options: dict[str, Any]

    @property
    def fields(self):
        """The fields of the descriptors."""
        x, t = self.logits, self.targets
        o = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "axis": 1} | self.options
        names = (x.shape, x.dtype.name, t.dtype.name, o["axis"], self.weight is not None)
        return (*names, o["ignore_index"], o["label_smoothing"], o["z_loss"])

    @property
    def given(self):
        """What every plan takes."""
        inputs = {"logits": self.logits, "targets": self.targets}
        return inputs if self.weight is None else inputs | {"weight": self.weight}


def work(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def problem(rng, shape, dtype, axis=1, kind="hard", weighted=False, z_loss=0.0, ignored=0.2, scale=3.0, index=np.int64):
    """Ordinary arguments; some rows are ignored."""
    axis %= len(shape)
    rows = shape[:axis] + shape[axis + 1 :]
    classes = shape[axis]
    x = (scale * rng.standard_normal(shape)).astype(dtype)
    if kind == "probabilities":
        y = rng.random(shape)
        targets = (y / y.sum(axis=axis, keepdims=True)).astype(dtype)
    else:
        targets = np.asarray(rng.integers(0, classes, rows)).astype(index)
        ignored_value = -100 if index != np.uint32 else 2**32 - 1
        targets = np.where(rng.random(rows) < ignored, np.array(ignored_value).astype(index), targets).astype(index)
    weight = rng.random(classes).astype(work(dtype)) if weighted else None
    options = {"axis": axis, "label_smoothing": 0.1 if kind != "hard" else 0.0, "z_loss": z_loss}
    if index == np.uint32:
        options["ignore_index"] = 2**32 - 1
    return Problem(x, targets, weight, np.asarray(rng.standard_normal(rows).astype(work(dtype))), options)


def with_zeros(rng, p):
    """The problem with zeros of both signs for most of its class weights, logits and gradients of losses."""

    def drawn(array):
        zeros = np.copysign(0.0, rng.random(array.shape) - 0.5)
        return np.where(rng.random(array.shape) < 0.6, zeros, array).astype(array.dtype)

    return p._replace(logits=drawn(p.logits), weight=drawn(p.weight), dlosses=drawn(p.dlosses))


def by_plan(p, gradient_in_place=False, device="cpu"):
    """(losses, state, gradient from the state, losses and gradient at once) of the kernels."""
    rows, of = p.dlosses.shape, p.dlosses.dtype
    losses, state = np.full(rows, 7, of), np.full((4, *rows), 7, of)
    forward = ig.CrossEntropyPlan.select(ig.CrossEntropyDescriptor(*p.fields), device)
    forward.run(**p.given, losses=losses, state=state)
    dx = np.full_like(p.logits, 7)
    backward = ig.CrossEntropyBackwardPlan.select(ig.CrossEntropyBackwardDescriptor(*p.fields), device)
    backward.run(**p.given, dlosses=p.dlosses, state=state, dlogits=dx)
    both = ig.CrossEntropyGradientPlan.select(ig.CrossEntropyGradientDescriptor(*p.fields), device)
    again = np.full(rows, 7, of)
    inputs = p.given
    if gradient_in_place:
        inputs = inputs | {"logits": p.logits.copy(order="K")}
        at_once = inputs["logits"]
    else:
        at_once = np.full_like(p.logits, 7)
    both.run(**inputs, dlosses=p.dlosses, losses=again, dlogits=at_once)
    return losses, state, dx, again, at_once


def by_definition(p):
    """The same from the reference."""
    with np.errstate(all="ignore"):
        losses, state = reference.cross_entropy(p.logits, p.targets, p.weight, **p.options)
        dx = reference.cross_entropy_backward(p.dlosses, p.logits, p.targets, state, p.weight, **p.options)
    return losses, state, dx, losses, dx


def raw(x):
    x = np.asarray(x)
    return x.dtype, x.shape, np.ascontiguousarray(x).tobytes()


def same(got, expected):
    """Which results differ, for messages."""
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if raw(a) != raw(b)]
