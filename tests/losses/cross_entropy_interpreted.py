"""Run under TRITON_INTERPRET=1: compare the Triton kernels of cross entropy with the reference in the interpreter.

    python cross_entropy_interpreted.py [--exhaustive] hard|smooth|probabilities|zeros|faults|parts|linear|reductions...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from choices import few
from cross_entropy_problems import KINDS as TARGETS
from cross_entropy_problems import NUMPY, Problem, by_definition, problem, raw, with_zeros
from interpreter_patches import report

import isograd as ig
from isograd.losses import cross_entropy_cuda, linear_bounds, linear_reference, linear_torch
from isograd.losses import cross_entropy_reference as reference
from isograd.losses.linear_torch import Pieces
from isograd.losses.triton_cross_entropy_launch import cross_entropy, cross_entropy_backward_in_part
from isograd.rows.triton_configuration import Configuration

INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}
Case = tuple[str, bool]
KINDS = (ig.CrossEntropyDescriptor, ig.CrossEntropyBackwardDescriptor, ig.CrossEntropyGradientDescriptor)

# shape, axis, tile: rows in one tile, rows that no power of two divides, other axes, rows longer than a tile
LOOP, STRIP = Configuration("loop", 16, 2, 4, 4, 2), Configuration("loop", 16, 4, 4, 2, 1)
CASES: tuple[tuple[tuple[int, ...], int, Configuration | None], ...] = (
    ((6, 64), 1, None),
    ((5, 37), 1, None),
    ((7,), 0, None),
    ((5, 1), 1, None),
    ((3, 20, 12), 1, None),
    ((3, 70), 1, LOOP),
    ((2, 20, 3, 2), 1, STRIP),
)


def to_torch(x: Any) -> torch.Tensor:
    """A tensor with the strides of a NumPy array, or at least its bits."""
    if x.dtype.name == "uint32":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int32).copy()).view(torch.uint32)
    if x.dtype.name not in INTEGER:
        return torch.from_numpy(np.array(x))
    return torch.from_numpy(x.view(INTEGER[x.dtype.name]).copy(order="K")).view(getattr(torch, x.dtype.name))


def to_numpy(t: torch.Tensor) -> Any:
    name = str(t.dtype).removeprefix("torch.")
    return t.view(getattr(torch, np.dtype(INTEGER[name]).name)).numpy().view(NUMPY[name])


def by_triton(p: Problem, config: Configuration | None) -> list[Any]:
    """(losses, state, gradient from the state, losses, gradient in place and state at once) of the Triton kernels."""
    rows, of = p.dlosses.shape, getattr(torch, p.dlosses.dtype.name)
    forward, backward, both = (kind(*p.fields).validated() for kind in KINDS)
    given = {name: to_torch(a) for name, a in p.given.items()}
    losses, state = torch.full(rows, 7, dtype=of), torch.full((4, *rows), 7, dtype=of)
    cross_entropy(forward, given | {"losses": losses, "state": state}, config)
    dx, g = torch.full_like(given["logits"], 7), to_torch(p.dlosses)
    cross_entropy(backward, given | {"dlosses": g, "state": state, "dlogits": dx}, config)
    again, kept = torch.full(rows, 7, dtype=of), torch.full((4, *rows), 7, dtype=of)
    place = given["logits"]
    cross_entropy(both, given | {"dlosses": g, "losses": again, "dlogits": place, "state": kept}, config)
    return [to_numpy(t) for t in (losses, state, dx, again, place, kept)]


def special(rng: np.random.Generator, p: Problem) -> Problem:
    """Special values strewn over the logits and, where they are probabilities, over the targets."""
    pool = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 6e4, -6e4])
    with np.errstate(all="ignore"):
        x = np.where(rng.random(p.logits.shape) < 0.02, rng.choice(pool, p.logits.shape), p.logits)
        targets = p.targets
        if targets.ndim == x.ndim:
            targets = np.where(rng.random(x.shape) < 0.01, rng.choice(pool, x.shape), targets).astype(targets.dtype)
        return p._replace(logits=x.astype(p.logits.dtype), targets=targets)


def compared(kind: str) -> Iterator[Case]:
    rng = np.random.default_rng(60)
    index = itertools.cycle([np.int64, np.int32, np.uint32])
    extras = ({"weighted": False, "z_loss": 0.0}, {"weighted": True, "z_loss": 1e-2})
    for dtype, (shape, axis, config), extra in few(5, list(NUMPY), CASES, extras):
        options = {**extra, "index": next(index)}
        p = special(rng, problem(rng, shape, NUMPY[dtype], axis, kind=kind, **options))
        with np.errstate(all="ignore"):
            got, expected = by_triton(p, config), by_definition(p)
        expected = (*expected, expected[1])
        wrong = [i for i, pair in enumerate(zip(got, expected, strict=True)) if raw(pair[0]) != raw(pair[1])]
        yield f"{kind} {dtype} {shape} {axis} {options} results {wrong}", not wrong
    # Gradients and logits with strides of their own, and a gradient of the loss that all rows share.
    p = problem(rng, (6, 40), np.float32, kind=kind)
    p = p._replace(logits=np.asfortranarray(p.logits), dlosses=np.full(6, p.dlosses[0]))
    descriptor = ig.CrossEntropyGradientDescriptor(*p.fields).validated()
    losses, dx = torch.empty(6), torch.empty(6, 80)[:, ::2]
    g = torch.tensor(p.dlosses[0]).expand(6)
    given = {name: to_torch(a) for name, a in p.given.items()}
    cross_entropy(descriptor, given | {"dlosses": g, "losses": losses, "dlogits": dx})
    expected = by_definition(p)
    yield f"{kind} strides", (raw(to_numpy(losses)), raw(to_numpy(dx))) == (raw(expected[0]), raw(expected[2]))


def zeros() -> Iterator[Case]:
    """Class weights and gradients that are zeros of both signs. The interpreter's maximum of logits orders none."""
    rng = np.random.default_rng(65)
    for dtype, kind, z, order in few(4, list(NUMPY), TARGETS, (0.0, 1e-2), ("C", "F")):
        p = problem(rng, (12, 9), NUMPY[dtype], kind=kind, weighted=True, z_loss=z)
        p = with_zeros(rng, p)._replace(logits=np.array(p.logits, order=order))
        with np.errstate(all="ignore"):
            got, expected = by_triton(p, None), by_definition(p)
        wrong = [
            i for i, pair in enumerate(zip(got, (*expected, expected[1]), strict=True)) if raw(pair[0]) != raw(pair[1])
        ]
        yield f"zeros {dtype} {kind} {z} {order} results {wrong}", not wrong


def faults() -> Iterator[Case]:
    rng = np.random.default_rng(61)
    for index, bad in ((np.int64, 40), (np.int64, -1), (np.int32, -7), (np.uint32, 41), (np.int64, 2**40)):
        p = problem(rng, (2, 40, 3), np.float32, index=index, ignored=0)
        targets = p.targets.copy()
        targets[1, 1] = bad
        with np.errstate(all="ignore"):
            got, expected = by_triton(p._replace(targets=targets), None), by_definition(p)
        marked = [np.isnan(got[0][1, 1]), np.isnan(got[1][:, 1, 1]).all(), np.isnan(got[2][1, :, 1]).all()]
        kept = np.ones((2, 3), bool)
        kept[1, 1] = False
        others = [raw(got[0][kept]) == raw(expected[0][kept])]
        others.append(raw(np.moveaxis(got[2], 1, 2)[kept]) == raw(np.moveaxis(expected[2], 1, 2)[kept]))
        others.append(raw(np.moveaxis(got[4], 1, 2)[kept]) == raw(np.moveaxis(expected[2], 1, 2)[kept]))
        try:
            ig.check()
            message = "nothing"
        except ig.IndexOutOfRangeError as error:
            message = str(error)
        told = f"targets has {bad} at flat position 4; accepted: 0 to 39" in message
        yield f"fault {bad}: {marked} {others} {message}", all(marked) and all(others) and told
    ig.check()
    p = problem(rng, (4, 8), np.float32)
    by_triton(p, None)
    ig.check()
    yield "no fault", True


def parts() -> Iterator[Case]:
    """The gradient of some classes from the states of whole rows."""
    rng = np.random.default_rng(64)
    index = itertools.cycle([np.int64, np.int32, np.uint32])
    extras = ({"weighted": False, "z_loss": 0.0}, {"weighted": True, "z_loss": 1e-2})
    for dtype, kind, extra in few(2, list(NUMPY), ("hard", "smooth"), extras):
        p = special(rng, problem(rng, (7, 45), NUMPY[dtype], kind=kind, index=next(index), **extra))
        targets = p.targets.copy()
        targets[:3] = 16, 36, 99  # the ends of a part, and none
        inside = p._replace(targets=np.where(targets == 99, 0, targets).astype(targets.dtype))
        with np.errstate(all="ignore"):
            _, state, expected, *_ = by_definition(inside)
        # What reported the fault left NaN in the state.
        state[:, 2], expected[2] = np.nan, np.nan
        descriptor = ig.CrossEntropyDescriptor(*p.fields).validated()
        for first, stop in ((0, 16), (16, 37), (37, 45)):
            x = p.logits[:, first:stop].copy()
            # A logit that was computed a second time, and is above its row's maximum now, counts as the maximum.
            largest = np.isfinite(state[0])[:, None] & (x.astype(state.dtype) == state[0][:, None])
            with np.errstate(all="ignore"):
                x[largest] += abs(x[largest]) * 40
            place = to_torch(x)
            given = {"logits": place, "targets": to_torch(targets), "state": to_torch(state), "dlogits": place}
            if p.weight is not None:
                given["weight"] = to_torch(p.weight)[first:stop]
            cross_entropy_backward_in_part(descriptor, first, given | {"dlosses": to_torch(p.dlosses)})
            yield f"part {dtype} {kind} {extra} {first}", raw(to_numpy(place)) == raw(expected[:, first:stop])
    ig.check()


# (rows, features, classes, pieces): slabs that are computed again, and those where dweight can keep nothing
LINEAR = {
    (5, 4, 9, Pieces(5, 9)): (0, 0),
    (5, 4, 9, Pieces(2, 9)): (1, 1),  # a chunk of rows beside all classes: few classes are one slab for any chunk
    (5, 4, 40, Pieces(2, 16)): (2, 3),  # one of three slabs is kept beside the chunk
    (3, 9, 40, Pieces(1, 16)): (0, 3),  # all of them; dweight is written from its end
    (6, 3, 40, Pieces(4, 16)): (2, 3),  # one of three; the chunk is longer than dweight
    (6, 3, 40, Pieces(3, 24)): (2, 2),  # the chunk is all of dweight
}


def linear() -> Iterator[Case]:
    """The products are torch's on the CPU here; small integers make them exact, so the reference's bits are due."""
    rng = np.random.default_rng(62)
    for dtype, shape, full in few(4, ("float32", "bfloat16", "float64"), list(LINEAR), (False, True)):
        rows, features, classes, size = shape
        of, wide = NUMPY[dtype], np.float64 if dtype == "float64" else np.float32
        hidden, weight = (rng.integers(-2, 3, (n, features)).astype(of) for n in (rows, classes))
        inputs = {"hidden": hidden, "weight": weight, "targets": rng.integers(0, classes, rows)}
        inputs["targets"][1:3] = -100, classes - 1
        if full:
            inputs |= {
                "bias": rng.integers(-2, 3, classes).astype(of),
                "class_weight": rng.random(classes).astype(wide),
            }
        g = rng.standard_normal(rows).astype(wide)
        options = {"label_smoothing": 0.1, "z_loss": 1e-2} if full else {}
        fields = (*shape[:3], dtype, "int64", full, full, -100, *(options.values() or (0.0, 0.0)))
        given = {name: to_torch(a) for name, a in inputs.items()}
        both = ig.LinearCrossEntropyGradientDescriptor(*fields).validated()
        empty = {o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in both.operands() if o.output}
        losses = torch.full_like(empty["losses"], 7)
        forward = ig.LinearCrossEntropyDescriptor(*fields).validated()
        with mock.patch.object(linear_torch, "pieces", return_value=size):
            linear_torch.linear_cross_entropy(forward, given | {"losses": losses})
        expected = linear_reference.linear_cross_entropy_gradient(g, **inputs, **options)
        bounds = linear_bounds.error_bound("linear_cross_entropy_gradient", linear_bounds.accumulated)(
            dlosses=g, **inputs, **options
        )
        truth = linear_reference.oracle_linear_cross_entropy_gradient(g, **inputs, **options)
        # In dweight of other strides nothing is kept.
        strided = empty | {"dweight": torch.full((features, classes), 7, dtype=empty["dweight"].dtype).t()}
        for out, again in zip((empty, strided), LINEAR[shape], strict=True):
            with (
                mock.patch.object(linear_torch, "pieces", return_value=size),
                mock.patch.object(
                    linear_torch, "cross_entropy_backward_in_part", wraps=cross_entropy_backward_in_part
                ) as patched,
            ):
                linear_torch.linear_cross_entropy(both, given | {"dlosses": to_torch(g)} | out)
            exact = [patched.call_count == again]
            exact += [raw(to_numpy(losses)) == raw(expected[0]), raw(to_numpy(out["losses"])) == raw(expected[0])]
            for tensor, right, limit in zip(list(out.values())[1:], truth[1:], bounds[1:], strict=True):
                error = np.abs(to_numpy(tensor.contiguous()).astype(np.longdouble) - right)
                exact.append(bool((error <= limit).all()))
            yield f"linear {dtype} {shape} {full} {out is strided}: {exact}", all(exact)


def order_free_linear() -> Iterator[Case]:
    """The products of 16-bit integers: the reference's bits, whatever is held, special values included."""
    rng = np.random.default_rng(66)
    for dtype, shape, full in few(2, ("float16", "bfloat16"), list(LINEAR), (False, True)):
        rows, features, classes, size = shape
        of = NUMPY[dtype]
        inputs = {
            "hidden": rng.standard_normal((rows, features)).astype(of),
            "weight": rng.standard_normal((classes, features)).astype(of),
            "targets": rng.integers(0, classes, rows),
        }
        inputs["targets"][1:3] = -100, classes - 1
        if full:
            inputs["bias"] = rng.standard_normal(classes).astype(of)
            inputs["class_weight"] = rng.random(classes).astype(np.float32)
            inputs["hidden"][rows - 1, 1], inputs["weight"][0, 2] = np.nan, np.inf
        options = {"label_smoothing": 0.1, "z_loss": 1e-2} if full else {}
        g = rng.standard_normal(rows).astype(np.float32)
        fields = (*shape[:3], dtype, "int64", full, full, -100, *(options.values() or (0.0, 0.0)))
        with np.errstate(all="ignore"):
            expected = [raw(a) for a in linear_reference.linear_cross_entropy_gradient(g, **inputs, **options)]
        given = {name: to_torch(a) for name, a in inputs.items()}
        both = ig.LinearCrossEntropyGradientDescriptor(*fields).validated()
        empty = {o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in both.operands() if o.output}
        losses = torch.full_like(empty["losses"], 7)
        forward = ig.LinearCrossEntropyDescriptor(*fields).validated()
        strided = empty | {
            "dweight": torch.full((features, classes), 7, dtype=empty["dweight"].dtype).t(),
            "dhidden": torch.full((features, rows), 7, dtype=empty["dweight"].dtype).t(),
        }
        with mock.patch.object(linear_torch, "pieces", return_value=size):
            linear_torch.linear_cross_entropy(forward, given | {"losses": losses}, order_free=True)
            yield f"losses {dtype} {shape} {full}", raw(to_numpy(losses)) == expected[0]
            for out in (empty, strided):
                linear_torch.linear_cross_entropy(both, given | {"dlosses": to_torch(g)} | out, order_free=True)
                got = [raw(to_numpy(t.contiguous())) for t in out.values()]
                yield f"all {dtype} {shape} {full} {out is strided}", got == expected
    # Nothing to add up, and no rows.
    for rows, features in ((3, 0), (0, 4)):
        both = ig.LinearCrossEntropyGradientDescriptor(rows, features, 9, "bfloat16", "int64", True).validated()
        inputs = {
            "hidden": np.zeros((rows, features), NUMPY["bfloat16"]),
            "weight": np.zeros((9, features), NUMPY["bfloat16"]),
            "targets": np.arange(rows),
            "bias": rng.standard_normal(9).astype(NUMPY["bfloat16"]),
        }
        g = np.ones(rows, np.float32)
        out = {o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in both.operands() if o.output}
        given = {name: to_torch(a) for name, a in inputs.items()} | {"dlosses": to_torch(g)}
        linear_torch.linear_cross_entropy(both, given | out, order_free=True)
        expected = [raw(a) for a in linear_reference.linear_cross_entropy_gradient(g, **inputs)]
        yield f"{rows} rows of {features}", [raw(to_numpy(t)) for t in out.values()] == expected


def reductions() -> Iterator[Case]:
    """What a mean divides by, and the quotient."""
    rng = np.random.default_rng(63)
    for index, work in itertools.product((np.int64, np.int32, np.uint32), ("float32", "float64")):
        p = problem(rng, (40, 9), NUMPY[work], index=index, weighted=True)
        ignored = p.options.get("ignore_index", -100)
        targets = to_torch(p.targets)
        for weight in (None, p.weight):
            got = cross_entropy_cuda.target_total(
                targets, None if weight is None else to_torch(weight), 9, ignored, work
            )
            expected = reference.denominator(p.targets, 40, NUMPY[work], weight, ignored)
            yield f"total {index} {work}", raw(to_numpy(got)) == raw(np.asarray(expected))
            quotient = cross_entropy_cuda.divided(to_torch(p.dlosses[:1]).reshape(()), got)
            yield "quotient", raw(to_numpy(quotient)) == raw(np.asarray(p.dlosses[0] / expected))
        sums = cross_entropy_cuda.total(to_torch(p.dlosses))
        yield "sum", raw(to_numpy(sums)) == raw(reference.reduced(p.dlosses, "sum"))
    targets = torch.from_numpy(rng.integers(-1, 3, 20_000))
    got = cross_entropy_cuda.target_total(targets, None, 3, -1, "float32")
    yield "total of many", to_numpy(got) == np.float32((targets != -1).sum())
    several = cross_entropy_cuda.divided(torch.arange(1500.0), torch.full((1500,), 3.0))
    yield "quotients", raw(to_numpy(several)) == raw(np.arange(1500, dtype=np.float32) / np.float32(3))
    nan = cross_entropy_cuda.divided(torch.zeros(()), torch.zeros(()))
    yield "0 / 0", to_numpy(nan).view(np.int32) == 0x7FC00000


if __name__ == "__main__":
    report(
        {kind: partial(compared, kind) for kind in TARGETS}
        | {"zeros": zeros, "faults": faults, "parts": parts, "linear": linear, "order_free_linear": order_free_linear}
        | {"reductions": reductions}
    )
