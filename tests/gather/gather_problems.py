"""Problems of gathers and scatter sums, and what solves them: plans and the reference."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd.gather import reference as ref

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INDEX_DTYPES = ["int64", "int32", "uint32"]
SUMS = ["take_along_axis_backward", "scatter_sum", "index_sum", "index_sum onto x"]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
each_sum = pytest.mark.parametrize("operation", SUMS)


def raw(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def run(operation, *, shape, indices, values=None, x=None, axis=0, out=None, **fields):
    """The plan's result. shape: of what is indexed. `out` is written, if it is given."""
    given = values if values is not None else x
    name, kind = np.dtype(given.dtype).name, indices.dtype.name
    result = shape if values is not None else None
    if operation == "take_along_axis":
        plan = ig.TakeAlongAxisPlan.select(ig.TakeAlongAxisDescriptor(shape, indices.shape, name, kind, axis))
        out = np.empty(indices.shape, given.dtype) if out is None else out
        plan.run(x=x, indices=indices, v=out)
        return out
    if operation == "index_select":
        plan = ig.IndexSelectPlan.select(ig.IndexSelectDescriptor(shape, indices.shape, name, kind))
        out = np.empty((*indices.shape, *shape[1:]), given.dtype) if out is None else out
        plan.run(weight=x, indices=indices, y=out)
        return out
    out = np.empty(result, given.dtype) if out is None else out
    if operation == "take_along_axis_backward":
        descriptor = ig.TakeAlongAxisBackwardDescriptor(shape, indices.shape, name, kind, axis, **fields)
        ig.TakeAlongAxisBackwardPlan.select(descriptor).run(indices=indices, dv=values, dx=out)
    elif operation == "scatter_sum":
        plan = ig.ScatterSumPlan.select(ig.ScatterSumDescriptor(shape, indices.shape, name, kind, axis))
        plan.run(indices=indices, values=values, x=x, out=out)
    else:
        adds = operation == "index_sum onto x"
        descriptor = ig.IndexSumDescriptor(shape, indices.shape, name, kind, accumulate=adds, **fields)
        base = {"x": x} if adds else {}
        ig.IndexSumPlan.select(descriptor).run(indices=indices, values=values, out=out, **base)
    return out


def reference(operation, *, shape, indices, values=None, x=None, axis=0, skipped=None, **_):
    if operation == "take_along_axis":
        return ref.take_along_axis(x, indices, axis)
    if operation == "index_select":
        return ref.index_select(x, indices)
    if operation == "take_along_axis_backward":
        return ref.take_along_axis_backward(values, indices, shape, axis)
    if operation == "scatter_sum":
        return ref.scatter_sum(shape, indices, values, axis, x)
    return ref.index_sum(shape, indices, values, x if operation == "index_sum onto x" else None, skipped)


def ordinary(operation, rng, dtype, n=40, k=60, others=(7,), kind="int64"):
    """A problem along axis 0, some of its destinations with many sources and some with none."""
    shape = (n, *others)
    rows = operation.startswith("index_sum")
    chosen = (k,) if rows else (k, *others)
    indices = np.where(rng.random(chosen) < 0.3, n // 2, rng.integers(0, n, chosen)).astype(kind)
    return {
        "shape": shape,
        "indices": indices,
        "values": rng.standard_normal((k, *others)).astype(dtype),
        "x": rng.standard_normal(shape).astype(dtype),
    }


def values_of(rng, flavour, shape, dtype):
    x = rng.standard_normal(shape)
    if flavour == "spread":
        x = x * np.exp2(rng.uniform(-160, 140, shape))
    elif flavour == "special":
        tiny = float(np.finfo(dtype).smallest_subnormal) if dtype != ml_dtypes.bfloat16 else 2.0**-133
        pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, tiny, -3 * tiny, 3e38, -3e38, 6e4, -6e4])
        x = np.where(rng.random(shape) < 0.3, rng.choice(pool, shape), x)
    elif flavour == "zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    return x.astype(dtype)
