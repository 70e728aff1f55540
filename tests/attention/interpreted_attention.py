"""Run under TRITON_INTERPRET=1: hold the Triton kernels of attention to the oracle in Triton's interpreter.

    python interpreted_attention.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "softmax"))
from interpreter_patches import few, report

from isograd import faults as fault_flags
from isograd.attention import bounds, reference
from isograd.attention import triton_launch as launch
from isograd.attention import triton_tiles as tiles
from isograd.attention.descriptors import AttentionBackwardDescriptor, AttentionDeltaDescriptor
from isograd.attention.options import AttentionOptions
from isograd.attention.reference import Inputs

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DTYPES = tuple(NUMPY)
NAMES = ("dq", "dk", "dv", "dbias", "dsinks")
OPTIONS = {
    "none": AttentionOptions(),
    "causal": AttentionOptions(causal=True),
    "upper left": AttentionOptions(causal=True, alignment="upper_left"),
    "window": AttentionOptions(window=(45, 3)),
    "left": AttentionOptions(causal=True, window=(20, None)),
    "wide window": AttentionOptions(window=(1 << 40, 5)),
    "scale": AttentionOptions(scale=0.3),
    "negative scale": AttentionOptions(scale=-0.2),
    "no scale": AttentionOptions(scale=0.0),
    "softcap": AttentionOptions(softcap=2.0),
    "dropout": AttentionOptions(dropout_p=0.2, seed=0xFEDCBA9876543210),
}
SMALL = tiles.Tile(32, 16, 4, 2)


class Shape(NamedTuple):
    batch: int = 2
    heads: int = 2
    groups: int = 1
    lq: int = 70
    lk: int = 100
    head_dim: int = 16
    v_dim: int = 24


class Case(NamedTuple):
    """Arrays of a problem; `extra` holds those that are optional, by the operands' names."""

    arrays: dict[str, Any]
    options: AttentionOptions
    extra: dict[str, Any]
    fixed: bool = False

    @property
    def dtype(self) -> str:
        return self.arrays["q"].dtype.name

    @property
    def inputs(self) -> Inputs:
        """The optional arrays as the oracle takes them."""
        e = self.extra
        segments = (e["q_segment_ids"], e["k_segment_ids"]) if "q_segment_ids" in e else None
        starts = (e["cu_seqlens_q"], e["cu_seqlens_k"]) if "cu_seqlens_q" in e else None
        return Inputs(e.get("bias"), e.get("mask"), segments, starts, e.get("sinks"))


def arrays(s: Shape, dtype: str, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    kv_heads = s.heads // s.groups
    shapes = {
        "q": (s.batch, s.heads, s.lq, s.head_dim),
        "k": (s.batch, kv_heads, s.lk, s.head_dim),
        "v": (s.batch, kv_heads, s.lk, s.v_dim),
        "do": (s.batch, s.heads, s.lq, s.v_dim),
    }
    return {name: rng.standard_normal(shape).astype(NUMPY[dtype]) for name, shape in shapes.items()}


def extras(s: Shape, dtype: str) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(NUMPY[dtype])

    bias = normal(1, s.heads, s.lq, s.lk)
    bias[0, 0, 3] = bias[0, 0, 4, 5:] = -math.inf
    mask = rng.random((s.batch, 1, s.lq, s.lk)) < 0.7
    mask[0, 0, 5] = False
    return {
        "nothing": {},
        "bias": {"bias": bias},
        "bias of keys": {"bias": normal(s.batch, 1, 1, s.lk).astype(np.float32)},
        "bias of queries": {"bias": normal(1, 1, s.lq, 1)},
        "one bias": {"bias": normal(1, 1, 1, 1)},
        "mask": {"mask": mask},
        "mask and bias": {"mask": mask[:1], "bias": normal(s.batch, s.heads, s.lq, s.lk)},
        "segments": {
            "q_segment_ids": np.sort(rng.integers(0, 4, (s.batch, s.lq))).astype(np.int32),
            "k_segment_ids": np.sort(rng.integers(0, 3, (s.batch, s.lk))).astype(np.int32),
        },
        "sinks": {"sinks": np.concatenate([normal(s.heads - 1), np.array([-math.inf], NUMPY[dtype])])},
        "dlse": {"dlse": normal(s.batch, s.heads, s.lq).astype(np.float32)},
    }


# --- running ----------------------------------------------------------------------------------------------------------
def to_torch(x: Any) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_numpy(t: torch.Tensor) -> Any:
    if t.dtype == torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values, of which tensor descriptors cannot address the rows."""
    return torch.cat([t, t[..., :1]], -1)[..., :-1]


def compute(case: Case, change: Any = lambda t: t, tile: tiles.Tile | None = None) -> dict[str, Any]:
    """o, lse and the gradients as arrays; `change` gives the rows other strides."""
    a, e = case.arrays, case.extra
    q, k, v = (a[name] for name in "qkv")
    descriptor = AttentionBackwardDescriptor(
        *q.shape[:2],
        k.shape[1],
        q.shape[2],
        *k.shape[2:],
        v.shape[3],
        case.dtype,
        case.options,
        bias_shape=e["bias"].shape if "bias" in e else None,
        bias_dtype=e["bias"].dtype.name if "bias" in e else None,
        mask_shape=e["mask"].shape if "mask" in e else None,
        segments="q_segment_ids" in e,
        sequences=len(e["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in e else None,
        sinks_dtype=e["sinks"].dtype.name if "sinks" in e else None,
        dlse="dlse" in e,
        dbias="bias" in e,
        dsinks="sinks" in e,
    ).validated()
    given = {name: change(to_torch(x)) for name, x in a.items()}
    given |= {name: to_torch(x) for name, x in e.items()}
    given |= {"o": change(torch.full_like(given["do"], 7)), "lse": torch.full(q.shape[:3], 7.0)}
    launch.forward(descriptor, given, tile)
    for name in ("q", "k", "v", "bias", "sinks"):
        if name in given:
            given["d" + name] = change(torch.full_like(given[name], 7))
    size = q.dtype.itemsize
    rule = tiles.backward(q.shape[3], v.shape[3], size, 0)._replace(fixed=case.fixed)
    if tile is not None:
        rule = tiles.BackwardTiles(tile, tile, case.fixed)
    launch.backward(descriptor, given, rule)
    names = [name for name in ("o", "lse", *NAMES) if name in given]
    return {name: to_numpy(given[name]) for name in names}


def fixed_error(case: Case, tile: int) -> Any:
    """How far integers may put dq off: half a quantum for every tile of keys that has a part of the row."""
    a, options = case.arrays, case.options.validated("attention", case.arrays["q"].shape[-1])
    q, k, v, do = (a[name].astype(np.float64) for name in ("q", "k", "v", "do"))
    groups = q.shape[1] // k.shape[1]
    largest = np.repeat(np.sqrt((v * v).sum(-1)).max(-1), groups, 1)
    rows = 2 * np.sqrt((do * do).sum(-1)) * largest[..., None] * options.dropout_factor
    rows = np.maximum(rows + np.abs(case.extra.get("dlse", 0)), 2.0**-96)
    columns = np.repeat(np.abs(k).max(2), groups, 1)
    # The kernel's bound is up to 1 part in 500 larger, which may double the power of two.
    quantum = 4 * rows[..., None] * columns[:, :, None] * 2.0**-30
    return abs(options.scale or 0) * quantum / 2 * -(-k.shape[2] // tile)


def right(case: Case, got: dict[str, Any], tile: int = 16) -> bool:
    """Whether every result is within the bounds that the plans state."""
    a, e, narrowed = case.arrays, case.extra, case.dtype != "float32"
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    with np.errstate(all="ignore"):
        o, lse = reference.oracle_attention(q, k, v, case.options, case.inputs)
        given = dict(q=q, k=k, v=v, options=case.options, inputs=case.inputs)
        allowed = bounds.error_bound("attention", narrowed)(**given)
        fine = [_within(got["o"], o, allowed[0]), _within(got["lse"], lse, allowed[1])]
        given |= {"do": do, "o": got["o"], "lse": got["lse"], "dlse": e.get("dlse")}
        gradients = reference.oracle_attention_backward(
            do, q, k, v, case.options, case.inputs, e.get("dlse"), got["o"], got["lse"]
        )
        allowed = bounds.error_bound("attention_backward", narrowed)(**given)
    for name, x, bound in zip(NAMES, gradients, allowed, strict=True):
        if x is not None:
            more = fixed_error(case, tile) if case.fixed and name == "dq" else 0.0
            fine.append(_within(got[name], x, bound + more))
    return all(fine)


def _within(got: Any, exact: Any, bound: Any) -> bool:
    got = got.astype(np.float64)
    same = (got == exact) | (np.isnan(got) & np.isnan(exact))
    with np.errstate(invalid="ignore"):
        return bool(np.all(same | (np.abs(got - exact) <= bound)))


# --- suites -----------------------------------------------------------------------------------------------------------
def options() -> Iterator[tuple[str, bool]]:
    """Every option with every optional operand."""
    s = Shape(groups=2, head_dim=24, v_dim=16)
    for option, extra, dtype in few(10, list(OPTIONS), list(extras(s, "float32")), DTYPES):
        case = Case(arrays(s, dtype), OPTIONS[option], extras(s, dtype)[extra])
        yield f"{option}, {extra}, {dtype}", right(case, compute(case, tile=SMALL))


def shapes() -> Iterator[tuple[str, bool]]:
    """Lengths, head dimensions and groups, with the tiles of the rule."""
    lengths = (0, 1, 2, 63, 64, 65, 130)
    for lq, lk, option in few(5, lengths, lengths, ("none", "causal", "window")):
        case = Case(arrays(Shape(1, 2, 1, lq, lk), "float32"), OPTIONS[option], {})
        yield f"{lq} {lk} {option}", right(case, compute(case))
    dims = (16, 40, 64, 72, 96, 128, 192, 256)
    for head_dim, v_dim, groups, dtype in few(9, dims, (16, 72, 256), (1, 2, 4), DTYPES):
        case = Case(arrays(Shape(1, 4, groups, 9, 40, head_dim, v_dim), dtype), OPTIONS["causal"], {})
        yield f"{head_dim} {v_dim} {groups} {dtype}", right(case, compute(case))


def fixed() -> Iterator[tuple[str, bool]]:
    """dQ as integers: with every option, over many magnitudes, and rows that are not finite."""
    s = Shape(groups=2, head_dim=16, v_dim=16)
    for option, extra, dtype in few(10, list(OPTIONS), list(extras(s, "float32")), ("float16", "bfloat16")):
        case = Case(arrays(s, dtype), OPTIONS[option], extras(s, dtype)[extra], fixed=True)
        yield f"{option}, {extra}, {dtype}", right(case, compute(case, tile=SMALL))
    for power, name in itertools.product((-120, 110), ("do", "v", "k")):
        a = arrays(Shape(1, 1, 1, 40, 40, 16, 16), "bfloat16")
        scale = 2.0 ** (-power) if name == "k" else None  # scores of any use
        a[name] = (a[name].astype(np.float32) * 2.0**power).astype(NUMPY["bfloat16"])
        case = Case(a, AttentionOptions(causal=True, scale=scale), {}, fixed=True)
        yield f"{name} times 2^{power}", right(case, compute(case, tile=SMALL))
    a = arrays(Shape(1, 1, 1, 40, 40, 16, 16), "bfloat16")
    a["k"][..., 3] *= 1000
    a["do"][0, 0, :7] *= 0
    case = Case(a, AttentionOptions(scale=0.001), {}, fixed=True)
    yield "one large channel, rows of zeros", right(case, compute(case, tile=SMALL))
    for name, value in itertools.product(("q", "do", "k", "v"), (math.nan, math.inf)):
        a = arrays(Shape(1, 2, 2, 70, 50, 16, 16), "bfloat16")
        a[name][0, 0, 33, 2] = value
        dq = compute(Case(a, AttentionOptions(), {}, fixed=True), tile=SMALL)["dq"].astype(np.float32)
        whole = name in "kv"
        marked = np.isnan(dq).all(-1)
        yield f"{name} {value}", bool(marked.all() if whole else marked.sum() == 1 and marked[0, 0, 33])


def packed() -> Iterator[tuple[str, bool]]:
    """Sequences one after the other have the bits that they have alone; so has a batch; strides leave no trace."""
    lengths = [(17, 33), (0, 5), (40, 40), (9, 0), (1, 2), (33, 70)]
    starts = [np.cumsum([0, *x]).astype(np.int32) for x in zip(*lengths, strict=True)]
    rng = np.random.default_rng(5)
    for option, dtype, integers in few(4, list(OPTIONS), ("float32", "bfloat16"), (False, True)):
        if OPTIONS[option].dropout_p:
            continue  # depends on the sequence's number
        parts = [arrays(Shape(1, 2, 2, *x, 16, 16), dtype, n) for n, x in enumerate(lengths)]
        sinks = {"sinks": rng.standard_normal(2).astype(np.float32)} if option in ("none", "window") else {}
        alone = [compute(Case(a, OPTIONS[option], sinks, integers), tile=SMALL) for a in parts]
        rest = arrays(Shape(1, 2, 2, 7, 3, 16, 16), dtype)  # rows beyond the last sequence
        together = {name: np.concatenate([*(a[name] for a in parts), rest[name]], 2) for name in rest}
        extra = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]} | sinks
        got = compute(Case(together, OPTIONS[option], extra, integers), tile=SMALL)
        names = ("o", "lse", "dq", "dk", "dv")
        same = all(
            np.concatenate([x[name] for x in alone], 2).tobytes() == got[name][:, :, : -3 if name in ("dk", "dv") else -7].tobytes()
            for name in names
        )
        empty = all(not got[name][:, :, -3:].any() for name in ("o", "dq", "dk", "dv"))
        yield f"{option} {dtype} {integers}", same and empty and bool(np.isneginf(got["lse"][:, :, -7:]).all())
        case = Case(together, OPTIONS[option], extra, integers)
        yield f"{option} {dtype} {integers}, values", integers or right(case, got)
    for n, integers in itertools.product(range(2), (False, True)):
        batch = arrays(Shape(3, 2, 1, 20, 40, 16, 16), DTYPES[n])
        whole = compute(Case(batch, OPTIONS["causal"], {}, integers), tile=SMALL)
        one = compute(Case({k: x[1:2] for k, x in batch.items()}, OPTIONS["causal"], {}, integers), tile=SMALL)
        yield f"batch {n} {integers}", all(one[name].tobytes() == whole[name][1:2].tobytes() for name in one)
        odd = compute(Case(batch, OPTIONS["causal"], {}, integers), unaligned, SMALL)
        yield f"strides {n} {integers}", all(odd[name].tobytes() == whole[name].tobytes() for name in odd)


def dropout() -> Iterator[tuple[str, bool]]:
    """The pattern follows sequence and positions alone: tiles and packing leave no trace."""
    case = Case(arrays(Shape(1, 2, 2, 50, 70), "float32"), OPTIONS["dropout"], {})
    for tile in (SMALL, tiles.Tile(64, 64, 4, 2), tiles.Tile(16, 32, 4, 2)):
        yield f"{tile}", right(case, compute(case, tile=tile))
    starts = {"cu_seqlens_q": np.array([0, 20, 50], np.int32), "cu_seqlens_k": np.array([0, 33, 70], np.int32)}
    case = case._replace(extra=starts)
    yield "packed", right(case, compute(case, tile=SMALL))


def faults() -> Iterator[tuple[str, bool]]:
    """Starts that are not in order are noted, and nothing outside of the tokens is touched."""
    for bad, value, position in (
        ([1, 20, 40], 1, 0),
        ([0, 30, 20], 20, 2),
        ([0, 20, 41], 41, 2),
        ([0, -5, 40], -5, 1),
        ([0, 1 << 30, 40], 1 << 30, 1),
    ):
        for which in ("cu_seqlens_q", "cu_seqlens_k"):
            good = np.array([0, 20, 40], np.int32)
            extra = {"cu_seqlens_q": good, "cu_seqlens_k": good} | {which: np.array(bad, np.int32)}
            compute(Case(arrays(Shape(1, 2, 1, 40, 40, 16, 16), "bfloat16"), OPTIONS["causal"], extra, True), tile=SMALL)
            yield f"{which} {bad}", _noted(which, position, value)


def _noted(which: str, position: int, value: int) -> bool:
    found = fault_flags._flags[-1]
    number, place, what, _ = found.tolist()
    found.zero_()
    source = fault_flags._sources[number - 1]
    return (source.argument, place, what) == (which, position, value)


def delta() -> Iterator[tuple[str, bool]]:
    """Row sums of o * do have the bits of the reference."""
    for dtype, v_dim in few(2, DTYPES, (16, 40, 64, 96, 128, 256)):
        a = arrays(Shape(2, 3, 1, 33, 5, 16, v_dim), dtype)
        o, do = a["do"], arrays(Shape(2, 3, 1, 33, 5, 16, v_dim), dtype, 1)["do"]
        o[0, 0, 1, 2], do[0, 0, 2, 3], o[0, 0, 3], o[0, 0, 4, :2] = math.inf, math.nan, 0, (math.inf, -math.inf)
        do[0, 0, 4, :2], o[1, 1] = 1, (o[1, 1].astype(np.float32) * 2.0**-14).astype(o.dtype)
        tensors = {"o": to_torch(o), "do": to_torch(do), "delta": torch.full((2, 3, 33), 7.0)}
        launch.delta(AttentionDeltaDescriptor(2, 3, 33, v_dim, dtype).validated(), tensors)
        yield f"{dtype} {v_dim}", tensors["delta"].numpy().tobytes() == reference.attention_delta(o, do).tobytes()


SUITES = {f.__name__: f for f in (options, shapes, fixed, packed, dropout, faults, delta)}

if __name__ == "__main__":
    report(SUITES)
