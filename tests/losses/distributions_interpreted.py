"""Run under TRITON_INTERPRET=1: compare Triton kernels with the reference in Triton's interpreter.

    python distributions_interpreted.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from choices import few
from distributions import named, reference, values
from interpreter_patches import report

import isograd as ig
from isograd.numerics.storage import compute_dtype
from isograd.ops.distillation_loss import operation as divergence
from isograd.ops.distillation_loss import triton as launch
from isograd.rows.triton_launch import Tile

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
FLAVOURS = ("normal", "spread", "special", "masked", "offset")
# shape and tile: whole rows, rows that no power of two divides, and rows longer than a tile
ROWS: tuple[tuple[tuple[int, ...], Tile | None], ...] = (
    ((6, 64), None),
    ((5, 37), None),
    ((5, 1), None),
    ((2, 3, 20), None),
    ((3, 70), Tile(16, 2, 4, 2, 4)),
    ((4, 72), Tile(32, 1, 8, 4, 4)),
)
Case = tuple[str, Any, Any]  # what it is, the kernel's result, the reference's


def to_torch(x: Any) -> torch.Tensor:
    if x.dtype.name == "uint32":
        return torch.from_numpy(np.array(x).view(np.int32)).view(torch.uint32)
    if x.dtype.name not in NUMPY:
        return torch.from_numpy(np.array(x))
    array = np.array(x, order="K")
    return torch.from_numpy(array.view(INTEGER[array.itemsize])).view(getattr(torch, x.dtype.name))


def bits(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        return t.contiguous().view(getattr(torch, np.dtype(INTEGER[t.element_size()]).name)).numpy()
    t = np.array(t, order="C")
    return t.view(INTEGER[t.itemsize])


def run(function: Any, descriptor: Any, inputs: dict[str, Any], size: Tile | None = None) -> torch.Tensor:
    """What a kernel writes, into memory that held something else."""
    descriptor = descriptor.validated()
    output = descriptor.operands()[-1]
    out = torch.full(output.shape, 7, dtype=getattr(torch, output.dtype))
    arguments = {name: to_torch(a) for name, a in inputs.items()} | {output.name: out}
    with np.errstate(all="ignore"):
        function(descriptor, **arguments, size=size)
    return out


def expected(operation: str, *arguments: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        return reference(operation)(*arguments, **options)


def distillation(top: bool, backward: bool) -> Iterator[Case]:
    for (seed, dtype), (i, (shape, size)) in few(4, list(enumerate(NUMPY)), list(enumerate(ROWS))):
        yield distilled(top, backward, (seed, i), dtype, FLAVOURS[(i + seed) % 5], shape, size)
    # Temperature 0.7: some quotients overflow.
    yield distilled(top, backward, (0, 2), "float32", "largest", (5, 40))


def distilled(
    top: bool,
    backward: bool,
    seeds: tuple[int, int],
    dtype: str,
    flavour: str,
    shape: tuple[int, ...],
    size: Tile | None = None,
) -> Case:
    rng, (seed, i) = np.random.default_rng(seeds), seeds
    x, t = (values(rng, flavour, shape, NUMPY[dtype]) for _ in range(2))
    reduction = ("none", "batchmean", "mean", "sum")[(i + seed) % 4]
    options: dict[str, Any] = {"temperature": (1.0, 2.0, 0.7)[i % 3], "reduction": reduction}
    inputs = {"student": x, "teacher": t}
    fields: dict[str, Any] = {"shape": shape, "dtype": dtype, **options}
    if top:
        if flavour in ("spread", "special"):
            x[..., 0] = 60  # a student whose rest is small
        k = min(shape[-1], (1, 5, 9)[i % 3])
        clean = rng.standard_normal(shape).astype(NUMPY[dtype])
        kept, indices = named(rng, clean, k, (np.int32, np.int64, np.uint32)[i % 3])
        inputs = {"student": x, "teacher": kept, "indices": indices}
        fields |= {"classes": k, "index_dtype": indices.dtype.name}
    label = f"{dtype} {shape} {flavour} {options}"
    if not backward:
        got = run(launch.distillation_loss, divergence.DistillationLossDescriptor(**fields), inputs, size)
        return label, got, expected("distillation_loss", **inputs, **options)
    g = values(rng, "normal", shape[:-1] if reduction == "none" else (), NUMPY[compute_dtype(dtype)])
    descriptor = divergence.DistillationLossBackwardDescriptor(**fields)
    got = run(launch.distillation_loss_backward, descriptor, {"dloss": g, **inputs}, size)
    return label, got, expected("distillation_loss_backward", g, **inputs, **options)


def faults() -> Iterator[Case]:
    """An index that is no class, or named twice, makes its row NaN, and the first kind is reported."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((5, 20)).astype(np.float32)
    kept, indices = named(rng, x, 4)
    for value, column in ((20, 1), (-1, 0), (2**40, 3), (int(indices[2, 0]), 1)):
        bad = indices.copy()
        bad[2, column] = value
        fields: dict[str, Any] = {"shape": (5, 20), "dtype": "float32", "classes": 4, "reduction": "none"}
        for backward in (False, True):
            inputs = {"student": x, "teacher": kept, "indices": bad}
            if backward:
                descriptor: Any = divergence.DistillationLossBackwardDescriptor(**fields)
                g = np.ones(5, np.float32)
                got = run(launch.distillation_loss_backward, descriptor, {"dloss": g, **inputs})
                right = expected("distillation_loss_backward", g, x, kept, indices, reduction="none")
            else:
                got = run(launch.distillation_loss, divergence.DistillationLossDescriptor(**fields), inputs)
                right = expected("distillation_loss", x, kept, indices, reduction="none")
            right[2] = np.nan
            yield f"{value} {backward}", got, right
            try:
                ig.check()
                message = "nothing"
            except ig.IndexOutOfRangeError as error:
                message = str(error)
            name = "distillation_loss_backward" if backward else "distillation_loss"
            found = f"{name}: indices has {value} at flat position {8 + column}; accepted: 0 to 19"
            told = "nothing" if 0 <= value < 20 else found
            yield f"{message} != {told}", np.array(message == told, np.float32), np.array(1, np.float32)


SUITES: dict[str, Any] = {
    "distillation": lambda: distillation(False, False),
    "distillation_backward": lambda: distillation(False, True),
    "top": lambda: distillation(True, False),
    "top_backward": lambda: distillation(True, True),
    "faults": faults,
}


def compared(suite: Callable[[], Iterator[Case]]) -> Iterator[tuple[str, bool]]:
    for label, got, right in suite():
        differing = int((bits(got) != bits(right)).sum())
        yield f"{label} differs in {differing} of {bits(right).size}", bits(got).tobytes() == bits(right).tobytes()


if __name__ == "__main__":
    report({name: partial(compared, suite) for name, suite in SUITES.items()})
