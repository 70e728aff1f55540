"""Run under TRITON_INTERPRET=1: compare the Triton kernels of `isograd.ops` with the reference in Triton's interpreter.

    python interpreted_operations.py [--exhaustive] OPERATION...

Prints the number of cases of each operation and of those that differ. Not a test itself: the variable acts when triton
is imported.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from choices import few
from interpreter_patches import report
from operations import FLAVOURS, NAMES, NUMPY, descriptor, expected, fits, inputs, launch_of, options, settings_of

from isograd.ops import OPERATIONS
from isograd.rows.triton_launch import Tile

EMPTY = ((0, 4), (3, 0))
INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
# Whole rows, rows that no power of two divides, other axes, and rows longer than a tile.
SHAPES: tuple[tuple[tuple[int, ...], int, Tile | None], ...] = (
    ((6, 64), 1, None),
    ((5, 37), 1, None),
    ((5, 1), 1, None),
    ((3, 20, 12), 1, None),
    ((2, 3, 1, 4, 2, 2), 3, None),
    ((3, 70), 1, Tile(16, 2, 4, 2, 4)),
    ((4, 72), 1, Tile(32, 2, 8, 4, 4)),
    ((3, 20, 12), 1, Tile(16, 4, 2, 1, 4)),
)


def to_torch(x: Any) -> torch.Tensor:
    array = np.array(x, order="K")
    return torch.from_numpy(array.view(INTEGER[array.itemsize])).view(getattr(torch, x.dtype.name))


def bits(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        return t.contiguous().view(getattr(torch, np.dtype(INTEGER[t.element_size()]).name)).numpy()
    t = np.array(t, order="C")
    return t.view(INTEGER[t.itemsize])


def compared(name: str) -> Iterator[tuple[str, bool]]:
    op = OPERATIONS[name]
    launch = launch_of(name)
    chosen = few(4, list(enumerate(NUMPY)), list(enumerate(SHAPES)))
    cases = [(dtype, *shape, (seed, i), i + seed) for (seed, dtype), (i, shape) in chosen]
    cases += [("float32", shape, 1, None, (0, i), i) for shape in EMPTY for i in range(4)]  # each choice of options
    if op.least_rank == 0:  # one element, and sums in several chunks
        cases += [(dtype, shape, 0, None, (1, i), i) for i, dtype in enumerate(NUMPY) for shape in ((), (2100,))]
    for dtype, shape, axis, size, seed, i in cases:
        if shape and not fits(op, shape, axis):
            continue
        rng = np.random.default_rng(seed)
        flavour, settings, given = FLAVOURS[i % 5], settings_of(op, axis, i), options(op, i)
        made = inputs(op, rng, flavour, shape, dtype, settings, given)
        if i % 3 == 0:  # memory in another order
            made[op.problem] = np.asfortranarray(made[op.problem])
        problem = descriptor(op, shape, dtype, settings, given)
        tile = {"size": size} if "size" in inspect.signature(launch).parameters else {}
        # Into memory that held something else.
        outputs = {
            o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in problem.operands() if o.output
        }
        with np.errstate(all="ignore"):
            launch(problem, **{key: to_torch(a) for key, a in made.items()}, **outputs, **tile)
        for (key, got), right in zip(outputs.items(), expected(op, made, settings, given), strict=True):
            differing = int((bits(got) != bits(right)).sum())
            label = f"{dtype} {shape} {flavour} {settings} {given} {size}: {key}"
            yield f"{label} differs in {differing} of {bits(right).size}", bits(got).tobytes() == bits(right).tobytes()


if __name__ == "__main__":
    report({name: partial(compared, name) for name in NAMES})
