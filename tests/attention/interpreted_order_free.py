"""Run under TRITON_INTERPRET=1: hold the Triton kernels of order-free attention to the bits of the reference.

    python interpreted_order_free.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from choices import around, through
from interpreted_attention import OPTIONS, Case, Shape, arrays, described, extras, to_numpy, to_torch, unaligned
from interpreter_patches import report

from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import reference
from isograd.flash_attention.order_free import triton_launch as launch

DTYPES = ("bfloat16", "float16")
GRADIENTS = ("dq", "dk", "dv", "dsinks")
SMALL = launch.Tile(64, 4, 1)


def compute(
    case: Case, change: Any = lambda t: t, tile: launch.Tile | None = SMALL, behind: slice = slice(0)
) -> dict[str, Any]:
    """o, lse and the gradients as arrays; `change` gives the rows other strides; o and lse are 5 in rows `behind`."""
    descriptor: Any = replace(described(case), dbias=False)
    given = {name: change(to_torch(x)) for name, x in case.arrays.items()}
    given |= {name: to_torch(x) for name, x in case.extra.items()}
    given |= {"o": change(torch.full_like(given["do"], 7)), "lse": torch.full(descriptor.lse_shape, 7.0)}
    launch.forward(descriptor, given, tile)
    forward = {name: to_numpy(given[name].clone()) for name in ("o", "lse")}
    given["o"][:, :, behind] = given["lse"][:, :, behind] = 5
    for name in ("q", "k", "v", "sinks"):
        if name in given:
            given["d" + name] = change(torch.full_like(given[name], 7)) if name in "qkv" else given[name] * 0 + 7
    tiles = None if tile is None else launch.BackwardTiles(tile, tile, 1 if tile is SMALL else 2)
    launch.backward(descriptor, given, tiles)
    return forward | {name: to_numpy(given[name].contiguous()) for name in GRADIENTS if name in given}


def right(case: Case, got: dict[str, Any], behind: slice = slice(0)) -> bool:
    """Whether every result has the bits of the reference; the backward pass saw 5 in rows `behind` of o and lse."""
    a, lse = case.arrays, case.extra.get("dlse")
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    o, sums = reference.attention(q, k, v, case.options, case.inputs)
    seen = {name: got[name].copy() for name in ("o", "lse")}
    seen["o"][:, :, behind] = seen["lse"][:, :, behind] = 5
    gradients = reference.attention_backward(do, q, k, v, *seen.values(), case.options, case.inputs, lse)
    wanted = {"o": o, "lse": sums, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    if gradients.dsinks is not None:
        wanted["dsinks"] = gradients.dsinks
    assert wanted.keys() == got.keys()
    wrong = [name for name, x in wanted.items() if x.tobytes() != got[name].tobytes()]
    for name in wrong:
        x, y = wanted[name].astype(np.float64), got[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            print(f"  {name}: {(~((x == y) | (np.isnan(x) & np.isnan(y)))).sum()} of {x.size} differ", file=sys.stderr)
    return not wrong


# --- suites ----------------------------------------------------------------------------------------------------------
def options() -> Iterator[tuple[str, bool]]:
    """Every option with every optional operand."""
    s = Shape(batch=1, groups=2, lq=40, lk=150, head_dim=24, v_dim=16)
    for option, extra, dtype in through(list(OPTIONS), list(extras(s, "float32")), DTYPES):
        case = Case(arrays(s, dtype), OPTIONS[option], extras(s, dtype)[extra])
        yield f"{option}, {extra}, {dtype}", right(case, compute(case))


def shapes() -> Iterator[tuple[str, bool]]:
    """Lengths, head dimensions and groups, with the tiles of the rule and others."""
    lengths = (0, 1, 63, 64, 65, 127, 128, 129, 300)
    chosen = (None, SMALL, launch.Tile(128, 8, 1))
    for lq, lk, option, tile in around(18, lengths, lengths, ("none", "causal", "window"), chosen):
        case = Case(arrays(Shape(1, 2, 1, lq, lk), "bfloat16"), OPTIONS[option], {})
        yield f"{lq} {lk} {option} {tile}", right(case, compute(case, tile=tile))
    dims = (16, 40, 64, 72, 96, 128, 192, 256)
    for head_dim, v_dim, groups, dtype in around(9, dims, (16, 72, 256), (1, 2, 4), DTYPES):
        case = Case(arrays(Shape(1, max(groups, 2), groups, 9, 140, head_dim, v_dim), dtype), OPTIONS["causal"], {})
        yield f"{head_dim} {v_dim} {groups} {dtype}", right(case, compute(case))


def packed() -> Iterator[tuple[str, bool]]:
    """Packed sequences, with rows beyond the last one, and each of them alone."""
    ends = {"cu_seqlens_q": [0, 70, 70, 75, 200], "cu_seqlens_k": [0, 130, 140, 140, 300]}
    starts = {name: np.array(x, np.int32) for name, x in ends.items()}
    for option in ("none", "causal", "upper left", "window", "dropout", "negative scale"):
        s = Shape(1, 2, 2, 210, 310)
        case = Case(arrays(s, "bfloat16"), OPTIONS[option], starts | {"sinks": extras(s, "bfloat16")["sinks"]["sinks"]})
        got = compute(case, behind=slice(200, None))
        yield f"{option}", right(case, got, slice(200, None))
        if option in ("dropout", "negative scale"):
            continue
        parts = zip(starts["cu_seqlens_q"], starts["cu_seqlens_q"][1:], starts["cu_seqlens_k"], strict=False)
        for n, (first, end, k_first) in enumerate(parts):
            i, j = slice(first, end), slice(k_first, starts["cu_seqlens_k"][n + 1])
            alone = {name: x[:, :, i if name in ("q", "do") else j] for name, x in case.arrays.items()}
            found = compute(case._replace(arrays=alone, extra={"sinks": case.extra["sinks"]}))
            same = [found[x].tobytes() == got[x][:, :, i].tobytes() for x in ("o", "lse", "dq")]
            same += [found[x].tobytes() == got[x][:, :, j].tobytes() for x in ("dk", "dv")]
            yield f"{option}, sequence {n} alone", all(same)


def strides() -> Iterator[tuple[str, bool]]:
    """Rows in any places of memory."""
    case = Case(arrays(Shape(2, 2, 1, 30, 140), "bfloat16"), OPTIONS["causal"], {})
    for name, change in (
        ("unaligned", unaligned),
        ("rows outside", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        yield name, right(case, compute(case, change))


def special() -> Iterator[tuple[str, bool]]:
    """What is not finite, scores out of reach, and rows of zeros."""
    s = Shape(1, 2, 1, 70, 200, 16, 24)
    options = (AttentionOptions(), AttentionOptions(causal=True), AttentionOptions(softcap=3.0))
    for n, (name, place, value) in enumerate(
        (x, y, z)
        for x in ("q", "k", "v", "do")
        for y, z in ((5, math.nan), (66, math.inf), (33, 0.0), (12, 2.0**100), (69, 2.0**-120))
    ):
        a = arrays(s, "bfloat16")
        a[name][0, 0, place] = value if value == 0.0 else a[name][0, 0, place] * abs(value)
        case = Case(a, options[n % 3], {})
        yield f"{name} {place} {value}", right(case, compute(case))
    for scale in (1e30, -1e30, 3e38, 1e-40):
        case = Case(arrays(s, "bfloat16"), AttentionOptions(scale=scale), {})
        yield f"scale {scale}", right(case, compute(case))
    for sink in (math.inf, math.nan, 1e30, -1e30):
        extra = {"sinks": np.array([sink, 0.5], np.float32)}
        case = Case(arrays(s, "bfloat16"), AttentionOptions(causal=True), extra)
        yield f"sink {sink}", right(case, compute(case))
    bias = np.zeros((1, 1, s.lq, s.lk), np.float32)
    bias[..., 3, :], bias[..., 7, 4], bias[..., 8, 4], bias[..., 9, :] = -math.inf, math.inf, math.nan, 1e30
    bias[..., 10, 150:], bias[..., 11, :128], bias[..., 12, :] = -1e38, -math.inf, np.finfo(np.float32).min
    case = Case(arrays(s, "bfloat16"), AttentionOptions(), {"bias": bias, "dlse": np.ones((1, 2, s.lq), np.float32)})
    yield "bias", right(case, compute(case))


SUITES = {f.__name__: f for f in (options, shapes, packed, strides, special)}

if __name__ == "__main__":
    report(SUITES)
