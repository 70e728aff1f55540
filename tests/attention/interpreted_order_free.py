"""Run under TRITON_INTERPRET=1: hold the kernels of order-free attention to the bits of the reference.

    python interpreted_order_free.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported. The kernels in Gluon for Hopper run in the emulation of `gluon_emulation.py`, those that cut as the others.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import gluon_emulation as emulation
from cached_sequences import Shape as Lengths
from cached_sequences import cached, paged, same, whole
from choices import EXHAUSTIVE, around, through
from interpreted_attention import OPTIONS, Case, Shape, arrays, described, extras, to_numpy, to_torch, unaligned
from interpreter_patches import report

from isograd.core import faults as fault_flags
from isograd.devices import triton_launcher
from isograd.devices.tma_launcher import BlockLauncher
from isograd.flash_attention.descriptors import AttentionWithCacheDescriptor
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import (
    gluon_backward,
    gluon_forward,
    gluon_integers,
    gluon_launch,
    reference,
)
from isograd.flash_attention.order_free import triton_launch as launch
from isograd.flash_attention.reference import Inputs

DTYPES = ("bfloat16", "float16")
GRADIENTS = ("dq", "dk", "dv", "dsinks")
SMALL = launch.Tile(64, 4, 1)


def compute(
    case: Case,
    change: Any = lambda t: t,
    tile: launch.Tile | None = SMALL,
    behind: slice = slice(0),
    absent: slice = slice(0),
) -> dict[str, Any]:
    """o, lse and the gradients as arrays; `change` gives the rows other strides.

    The backward pass sees 5 as o and lse of rows `behind`, and -inf as lse of those that are `absent`.
    """
    descriptor: Any = replace(described(case), dbias=False)
    given = {name: change(to_torch(x)) for name, x in case.arrays.items()}
    given |= {name: to_torch(x) for name, x in case.extra.items()}
    given |= {"o": change(torch.full_like(given["do"], 7)), "lse": torch.full(descriptor.lse_shape, 7.0)}
    launch.forward(descriptor, given, tile)
    forward = {name: to_numpy(given[name].clone()) for name in ("o", "lse")}
    given["o"][:, :, behind] = given["lse"][:, :, behind] = 5
    given["lse"][:, :, absent] = -math.inf
    for name in ("q", "k", "v", "sinks"):
        if name in given:
            given["d" + name] = change(torch.full_like(given[name], 7)) if name in "qkv" else given[name] * 0 + 7
    tiles = None if tile is None else launch.BackwardTiles(tile, tile, 1 if tile is SMALL else 2)
    launch.backward(descriptor, given, tiles)
    return forward | {name: to_numpy(given[name].contiguous()) for name in GRADIENTS if name in given}


def right(case: Case, got: dict[str, Any], behind: slice = slice(0), absent: slice = slice(0)) -> bool:
    """Whether every result has the bits of the reference; `behind` and `absent` as in `compute`."""
    a, lse = case.arrays, case.extra.get("dlse")
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    o, sums = reference.attention(q, k, v, case.options, case.inputs)
    seen = {name: got[name].copy() for name in ("o", "lse")}
    seen["o"][:, :, behind] = seen["lse"][:, :, behind] = 5
    seen["lse"][:, :, absent] = -math.inf
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


# --- the kernels for Hopper ------------------------------------------------------------------------------------------
@contextmanager
def emulate(launched: list[str], seed: int = 0) -> Iterator[None]:
    """Take what would be taken on Hopper, and note the kernels that are launched."""
    supports = gluon_launch.supports

    def run(self: BlockLauncher, *tensors: torch.Tensor) -> None:
        launched.append(self._kernel.__name__)
        emulation.call(self, *tensors, seed=seed)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(BlockLauncher, "__call__", run))
        # which would ask for the kernel's source and that of all it calls, not there in the interpreter
        stack.enter_context(mock.patch.object(triton_launcher, "unspecialized", lambda kernel, free: kernel))
        there = lambda p, *rest: supports(p._replace(architecture=90), *rest)  # noqa: E731
        stack.enter_context(mock.patch.object(gluon_launch, "supports", there))
        yield


FORWARD, BACKWARD = "order_free_forward_hopper", "order_free_backward_hopper"
# Ends of packed sequences: without rows, without keys, without either, longer than a block; rows are left over.
ENDS = ((0, 70, 70, 75, 75, 205), (0, 40, 60, 60, 60, 330))
S = Shape(1, 1, 1, 70, 150, 64, 64)
WIDE = S._replace(head_dim=128, v_dim=128)
PLAIN, CAUSAL = OPTIONS["none"], OPTIONS["causal"]
UPPER = AttentionOptions(window=(80, 9), alignment="upper_left")


class OnHopper(NamedTuple):
    """A problem of random numbers; ends: of packed sequences."""

    shape: Shape
    options: AttentionOptions = CAUSAL
    ends: Any = None
    sinks: bool = False

    def case(self, dtype: str) -> Case:
        extra = {"sinks": np.linspace(1, -1, self.shape.heads, dtype=np.float32)} if self.sinks else {}
        for side, e in zip("qk", self.ends or (), strict=False):
            extra[f"cu_seqlens_{side}"] = np.array(e, np.int32)
        return Case(arrays(self.shape, dtype), self.options, extra)


HOPPER_FEW = {
    "full": OnHopper(S, PLAIN),
    "causal, shared heads, sinks": OnHopper(S._replace(heads=2, groups=2, lk=130), CAUSAL, None, True),
    "128": OnHopper(WIDE._replace(lq=40)),
    "72 and 40, softcap": OnHopper(S._replace(lq=40, lk=100, head_dim=72, v_dim=40), AttentionOptions(softcap=2.0)),
    "packed": OnHopper(S._replace(lq=223, lk=335), AttentionOptions(causal=True, scale=-0.2), ENDS, True),
    "window, upper left": OnHopper(S._replace(lq=256, lk=300), UPPER),
}
HOPPER = HOPPER_FEW | {
    "batch": OnHopper(S._replace(batch=2, heads=2, lq=1, lk=300), PLAIN),
    "one key": OnHopper(S._replace(lq=130, lk=1), PLAIN),
    "64 and 128": OnHopper(S._replace(v_dim=128), CAUSAL, None, True),
    "128 and 64": OnHopper(WIDE._replace(v_dim=64)),
    "40 and 72": OnHopper(S._replace(head_dim=40, v_dim=72), PLAIN),
    "rows without keys": OnHopper(S._replace(lq=200, lk=70)),
    "long": OnHopper(S._replace(lq=330, lk=650)),
    "long, 128": OnHopper(WIDE._replace(lq=330, lk=650), CAUSAL, None, True),
    "window": OnHopper(S._replace(lq=300, lk=420), OPTIONS["window"]),
    "window behind the keys": OnHopper(S._replace(lq=400, lk=150), UPPER),
    "window, 128": OnHopper(WIDE._replace(lq=200, lk=300), UPPER),
    "left window": OnHopper(S._replace(lq=200, lk=300, groups=2, heads=4), OPTIONS["left"]),
    "softcap": OnHopper(S._replace(lq=130, lk=260), AttentionOptions(causal=True, softcap=1.5), None, True),
    "negative scale": OnHopper(S, OPTIONS["negative scale"]),
    "shared heads, 128": OnHopper(WIDE._replace(heads=4, groups=4, lq=130, lk=180)),
    "packed, full": OnHopper(S._replace(heads=2, groups=2, lq=223, lk=335), PLAIN, ENDS, True),
    "packed, 128": OnHopper(WIDE._replace(lq=223, lk=335), OPTIONS["upper left"], ENDS, True),
    "packed, window": OnHopper(S._replace(lq=223, lk=335, v_dim=128), UPPER, ENDS),
}


def hopper() -> Iterator[tuple[str, bool]]:
    """The kernels in Gluon for Hopper, whose protocol the emulation checks as well."""
    chosen = HOPPER if EXHAUSTIVE else HOPPER_FEW
    for n, (name, dtype) in enumerate(through(list(chosen), DTYPES)):
        problem = chosen[name]
        behind = slice(0) if problem.ends is None else slice(problem.ends[0][-1], None)
        yield f"{name}, {dtype}", on_hopper(problem.case(dtype), n, behind)
    values = ((5, math.nan), (135, math.inf), (140, 2.0**100), (69, 2.0**-120), (33, 0.0))
    special = (CAUSAL, PLAIN, AttentionOptions(softcap=3.0))
    for name, (place, value), option, size in around(8, ("q", "k", "v", "do"), values, special, (64, 128)):
        a = arrays(Shape(1, 1, 1, 150, 150, size, size), "bfloat16")
        a[name][0, 0, place] = value if value == 0.0 else a[name][0, 0, place] * abs(value)
        yield f"{name} {place} {value} {size} {option}", on_hopper(Case(a, option, {}))
    a = arrays(S._replace(lq=150), "bfloat16")
    a["k"][0, 0, 120] = math.nan  # seen by absent queries alone
    yield "absent queries", on_hopper(Case(a, CAUSAL, {}), absent=slice(100, None))
    a = arrays(S._replace(lq=200, lk=300), "bfloat16")
    a["v"][:, :, :128] *= 2.0**-110
    a["v"][:, :, 128:] *= 2.0**-132  # nothing beside them; some rows do not see the last block
    yield "zeros of either sign", on_hopper(Case(a, AttentionOptions(causal=True, scale=8.0), {}))
    for scale, sink in through((1e30, -1e30, 3e38, 1e-40), (math.inf, math.nan, 1e30, -1e30)):
        case = Case(
            arrays(S._replace(heads=2), "bfloat16"),
            AttentionOptions(causal=True, scale=scale),
            {"sinks": np.array([sink, 0.5], np.float32)},
        )
        yield f"scale {scale}, sink {sink}", on_hopper(case)
    over = (AttentionOptions(causal=True, window=(100, None)), CAUSAL, AttentionOptions(causal=True, softcap=2.0))
    for option, page_size in through(over, (None, 16)):
        yield f"cache, {option}, {page_size}", over_a_cache(option, page_size)
    yield "cache with a fault", over_a_cache(CAUSAL, None, True)


def on_hopper(case: Case, seed: int = 0, behind: slice = slice(0), absent: slice = slice(0)) -> bool:
    """Whether the kernels for Hopper are launched and have the bits of the reference."""
    launched: list[str] = []
    with emulate(launched, seed):
        got = compute(case, tile=None, behind=behind, absent=absent)
    return launched == [FORWARD, *[BACKWARD] * 3] and right(case, got, behind, absent)


def over_a_cache(options: AttentionOptions, page_size: int | None, fault: bool = False) -> bool:
    """Whether rows over a cache have the bits of whole sequences, and NaN where a length of keys is out of range."""
    lengths = [150, 129, 0, 3]
    w = whole(Lengths((150, 129, 0, 33), 2, 1, 64, 64), "bfloat16", True)
    a = cached(w, lengths, 3, 160) if page_size is None else paged(w, lengths, 3, page_size)
    if fault:
        a["cache_seqlens"][1] = 161
    given = {name: to_torch(x) for name, x in a.items()}
    capacity = 160 if page_size is None else a["block_table"].shape[1] * page_size
    pages: Any = {} if page_size is None else {"page_size": page_size, "pages": len(a["k"])}
    sizes = (4, 2, 1, 3, capacity, 64, 64)
    d = AttentionWithCacheDescriptor(*sizes, "bfloat16", options, sinks_dtype="bfloat16", **pages).validated()
    given |= {"o": torch.full(d.o_shape, 7.0, dtype=torch.bfloat16), "lse": torch.full(d.lse_shape, 7.0)}
    launched: list[str] = []
    with emulate(launched):
        launch.forward(d, given)
    fault_flags.flag(torch.device("cpu")).zero_()
    inputs = Inputs(sinks=w.sinks)
    expected = [reference.attention(*x, d.options, inputs) for x in zip(w.q, w.k, w.v, strict=True)]
    got = to_numpy(given["o"]), to_numpy(given["lse"])
    if fault:
        broken = all(np.isnan(x[1].astype(np.float32)).all() for x in got)
        return launched == [FORWARD] and broken and same(expected, got, a, (0, 2, 3))
    return launched == [FORWARD] and same(expected, got, a)


PHASE = "mbarrier.wait(b_full.index(at), step // B_SLOTS & 1"
FAULTS = {
    "no wait for queries": (gluon_forward, "mbarrier.wait(q_full, 0)", "pass"),
    "no wait for room": (gluon_forward, "mbarrier.wait(v_empty.index(at), phase)", "pass"),
    "the other phase": (gluon_backward, PHASE, f"{PHASE} ^ 1"),
    "no arrival": (gluon_backward, "mbarrier.arrive(n_empty.index(slot))", "pass"),
    "no wait for a product": (gluon_integers, "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "two bytes for each other": (gluon_integers, "0x7531", "0x7351"),
}


def hopper_faults() -> Iterator[tuple[str, bool]]:
    """The emulation would be worth nothing if it let such faults pass."""
    case = OnHopper(S._replace(lq=300, lk=300)).case("bfloat16")

    def found(module: Any, line: str, text: str, seed: int) -> bool:
        with emulation.planted(module, line, 0, text), redirect_stderr(StringIO()):
            try:
                return not on_hopper(case, seed)
            except (AssertionError, RuntimeError, TimeoutError, TypeError):
                return True

    for name, fault in FAULTS.items():
        yield name, any(found(*fault, seed) for seed in range(3))  # what has no order may come in the right one


SUITES = {f.__name__: f for f in (options, shapes, packed, strides, special, hopper, hopper_faults)}

if __name__ == "__main__":
    report(SUITES)
