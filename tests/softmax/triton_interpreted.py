"""Run under TRITON_INTERPRET=1: compare kernels with the reference in Triton's interpreter as it is, without a patch.

    python triton_interpreted.py unfused|truncated...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

sys.path.insert(0, str(Path(__file__).parents[1]))
from choices import few
from interpreter_patches import ORIGINAL, report

from isograd.ops.softmax import reference
from isograd.ops.softmax.triton import launch
from isograd.rows.triton_configuration import Configuration

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}

# shape, axis, configuration: whole rows, rows that no power of two divides, other axes, and rows longer than a tile
CASES: tuple[tuple[tuple[int, ...], int, Configuration | None], ...] = (
    ((6, 64), 1, None),
    ((5, 37), 1, None),
    ((5, 1), 1, None),
    ((1, 1), 0, None),
    ((3, 20, 12), 1, None),
    ((7, 5), 0, None),
    ((2, 3, 1, 4, 2, 2), 3, None),
    ((3, 70), 1, Configuration("loop", 16, 2, 4, 4, 2)),
    ((3, 20, 12), 1, Configuration("loop", 16, 4, 4, 2, 1)),
)


def to_torch(x: Any) -> torch.Tensor:
    bits = torch.from_numpy(np.ascontiguousarray(x).view(INTEGER[x.dtype.name]).copy())
    return bits.view(getattr(torch, x.dtype.name))


def to_numpy(t: torch.Tensor, dtype: str) -> Any:
    return t.contiguous().view(getattr(torch, np.dtype(INTEGER[dtype]).name)).numpy().view(NUMPY[dtype])


def inputs(operation: str, dtype: str, shape: tuple[int, ...], axis: int, seed: int) -> list[Any]:
    """Random rows of every magnitude, with all special values strewn over some of them."""
    generator = np.random.default_rng(seed)
    scales = [1e-4, 1, 100] if dtype == "float16" else [1e-30, 1, 1e10]
    arrays = [
        generator.standard_normal(shape) * 4,
        generator.standard_normal(shape) * generator.choice(scales, size=shape),
    ]
    specials = (np.inf, -np.inf, np.nan, 0.0, -0.0, 65504, -65504)
    with np.errstate(all="ignore"):
        x, dy = (a.astype(NUMPY[dtype]) for a in arrays)
        for a in (x, dy):
            for value in specials if x.size > 40 else ():
                a.reshape(-1)[generator.integers(a.size)] = value
        if not operation.endswith("backward"):
            return [x]
        y = getattr(reference, operation.removesuffix("_backward"))(x, axis)
        return [dy, y]


def agreeing(operation: str) -> Iterator[tuple[str, bool]]:
    for dtype, (seed, (shape, axis, config)) in few(3, list(NUMPY), list(enumerate(CASES))):
        arrays = inputs(operation, dtype, shape, axis, seed)
        out = to_torch(arrays[0]).fill_(7)
        with np.errstate(all="ignore"):
            launch(operation, [*map(to_torch, arrays), out], axis, config)
            expected = getattr(reference, operation)(*arrays, axis)
        got, expected = to_numpy(out, dtype).view(INTEGER[dtype]), expected.view(INTEGER[dtype])
        yield f"{operation} {dtype} {shape} axis {axis} {config}", not (got != expected).any()


def unfused() -> Iterator[tuple[str, bool]]:
    """With the interpreter's own `tl.fma`."""
    with mock.patch.multiple(InterpreterBuilder, create_fma=ORIGINAL["create_fma"]):
        yield from agreeing("softmax")


def truncated() -> Iterator[tuple[str, bool]]:
    """With the interpreter's own conversion to bfloat16."""
    names = ("cast_impl", "create_fp_to_fp")
    with mock.patch.multiple(InterpreterBuilder, **{name: ORIGINAL[name] for name in names}):
        yield from agreeing("softmax_backward")


if __name__ == "__main__":
    report({"unfused": unfused, "truncated": truncated})
