"""Run under TRITON_INTERPRET=1: gradients of norms where programs take many rows or dx overwrites, and packed gates.

    python interpreted_ops.py SUITE...

Not a test itself: the variable acts when triton is imported.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from interpreted_operations import bits, to_torch
from interpreter_patches import report
from operations import descriptor, expected, inputs, launch_of, settings_of

from isograd.ops import OPERATIONS
from isograd.rows import triton_norms, triton_sums


def compared(
    name: str, shape: tuple[int, int], dtype: str, flavour: str, place: str = "", given: tuple[str, ...] | None = None
) -> Iterator[tuple[str, bool]]:
    """Whether the outputs have the reference's bits; place: the input that dx overwrites."""
    op, rng = OPERATIONS[name], np.random.default_rng(shape[0])
    settings, given = settings_of(op, -1), list(op.optional if given is None else given)
    made = inputs(op, rng, flavour, shape, dtype, settings, given)
    problem = descriptor(op, shape, dtype, settings, given)
    tensors = {key: to_torch(a) for key, a in made.items()}
    outputs = {o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in problem.operands() if o.output}
    if place:
        outputs["dx"] = tensors[place]
    with np.errstate(all="ignore"):
        launch_of(name)(problem, **tensors, **outputs)
    for (key, found), right in zip(outputs.items(), expected(op, made, settings, given), strict=True):
        what = f"{dtype} {shape} {flavour} {place}: {key} differs in {(bits(found) != bits(right)).sum()}"
        yield what, bits(found).tobytes() == bits(right).tobytes()


def stay(kind: str) -> Iterator[tuple[str, bool]]:
    """Two programs: they take several rows, a tile at a time or one alone."""
    with mock.patch.object(triton_norms, "_STAY", 1):
        yield from compared(f"{kind}_backward", (150, 64), "float32", "normal")
        yield from compared(f"{kind}_backward", (5, 2048), "bfloat16", "normal")
        yield from compared(f"{kind}_backward", (5, 2048), "float32", "special")
        yield from compared(f"add_{kind}_backward", (5, 2000), "float16", "normal")


def places(kind: str) -> Iterator[tuple[str, bool]]:
    """Results in the place of each input that dx may overwrite."""
    for place in ("dy", "x"):
        yield from compared(f"{kind}_backward", (9, 40), "float32", "normal", place)
    for place in ("dy", "summed", "dsummed"):
        yield from compared(f"add_{kind}_backward", (9, 40), "bfloat16", "normal", place)
        yield from compared(f"add_{kind}_backward", (9, 40), "float32", "normal", place, ("dsummed",))


def words(kind: str) -> Iterator[tuple[str, bool]]:
    """Sums of more terms than a word of limbs takes."""
    with mock.patch.object(triton_sums, "_ROUNDS", tl.constexpr(2)), mock.patch.object(triton_sums, "_WAVES", 1):
        for flavour in ("normal", "special"):
            yield from compared(f"{kind}_backward", (300, 8), "float32", flavour)
        yield from compared(f"{kind}_backward", (100, 8), "float64", "normal")


def packed(name: str) -> Iterator[tuple[str, bool]]:
    """Both halves of a gradient, in the place of the input too."""
    for shape, dtype, flavour in (((5, 34), "bfloat16", "normal"), ((3, 1200), "float32", "special")):
        yield from compared(name, shape, dtype, flavour)
        for place in ("", "x"):
            yield from compared(f"{name}_backward", shape, dtype, flavour, place)


if __name__ == "__main__":
    suites = {"stay": stay, "places": places, "words": words}
    norms = {f"{name}_{kind}": partial(f, kind) for name, f in suites.items() for kind in ("rmsnorm", "layernorm")}
    report(norms | {f"packed_{name}": partial(packed, name) for name in ("swiglu", "geglu")})
