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

sys.path.insert(0, str(Path(__file__).parents[1]))
from choices import around, few, through
from interpreter_patches import report

from isograd.core import faults as fault_flags
from isograd.flash_attention import bounds, reference
from isograd.flash_attention import triton_launch as launch
from isograd.flash_attention import triton_problem as problem
from isograd.flash_attention import triton_rows_launch as rows_launch
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDeltaDescriptor
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.reference import Inputs

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


def described(case: Case) -> AttentionBackwardDescriptor:
    a, e = case.arrays, case.extra
    q, k, v = (a[name] for name in "qkv")
    return AttentionBackwardDescriptor(
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


def compute(
    case: Case, change: Any = lambda t: t, tile: tiles.Tile | None = None, behind: slice = slice(0)
) -> dict[str, Any]:
    """o, lse and the gradients as arrays; `change` gives the rows other strides; o and lse are 5 in rows `behind`."""
    descriptor = described(case)
    given = {name: change(to_torch(x)) for name, x in case.arrays.items()}
    given |= {name: to_torch(x) for name, x in case.extra.items()}
    given |= {"o": change(torch.full_like(given["do"], 7)), "lse": torch.full(descriptor.lse_shape, 7.0)}
    launch.forward(descriptor, given, tile)
    given["o"][:, :, behind] = given["lse"][:, :, behind] = 5
    for name in ("q", "k", "v", "bias", "sinks"):
        if name in given:
            given["d" + name] = change(torch.full_like(given[name], 7))
    launch.backward(descriptor, given, None if tile is None else tiles.BackwardTiles(tile, tile))
    names = [name for name in ("o", "lse", *NAMES) if name in given]
    return {name: to_numpy(given[name]) for name in names}


def right(case: Case, got: dict[str, Any]) -> bool:
    """Whether every result is within the bounds that the plans state."""
    a, e, narrowed = case.arrays, case.extra, case.dtype != "float32"
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    with np.errstate(all="ignore"):
        o, lse = reference.oracle_attention(q, k, v, case.options, case.inputs)
        given = {"q": q, "k": k, "v": v, "options": case.options, **named(case.inputs)}
        allowed = bounds.error_bound("attention", narrowed)(**given)
        fine = [_within(got["o"], o, allowed[0]), _within(got["lse"], lse, allowed[1])]
        given |= {"do": do, "o": got["o"], "lse": got["lse"], "dlse": e.get("dlse")}
        gradients = reference.oracle_attention_backward(
            do, q, k, v, case.options, case.inputs, e.get("dlse"), got["o"], got["lse"]
        )
        allowed = bounds.error_bound("attention_backward", narrowed)(**given)
    present = [(name, x) for name, x in zip(NAMES, gradients, strict=True) if x is not None]
    for (name, x), bound in zip(present, allowed, strict=True):
        fine.append(_within(got[name], x, bound))
    return all(fine)


def named(inputs: Inputs) -> dict[str, Any]:
    """The optional operands by the names that a plan has for them."""
    found = {"bias": inputs.bias, "mask": inputs.mask, "sinks": inputs.sinks}
    pairs = {"segment_ids": ("q_segment_ids", "k_segment_ids"), "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k")}
    for pair, names in pairs.items():
        found |= dict(zip(names, getattr(inputs, pair) or (None, None), strict=True))
    return {name: x for name, x in found.items() if x is not None}


def _within(got: Any, exact: Any, bound: Any) -> bool:
    got = got.astype(np.float64)
    same = (got == exact) | (np.isnan(got) & np.isnan(exact))
    with np.errstate(invalid="ignore"):
        return bool(np.all(same | (np.abs(got - exact) <= bound)))


# --- suites -----------------------------------------------------------------------------------------------------------
def options() -> Iterator[tuple[str, bool]]:
    """Every option with every optional operand."""
    s = Shape(groups=2, lq=40, lk=70, head_dim=24, v_dim=16)
    for option, extra, dtype in through(list(OPTIONS), list(extras(s, "float32")), DTYPES):
        case = Case(arrays(s, dtype), OPTIONS[option], extras(s, dtype)[extra])
        yield f"{option}, {extra}, {dtype}", right(case, compute(case, tile=SMALL))


def shapes() -> Iterator[tuple[str, bool]]:
    """Lengths, head dimensions and groups, with the tiles of the rule."""
    lengths = (0, 1, 2, 63, 64, 65, 130)
    for lq, lk, option in around(14, lengths, lengths, ("none", "causal", "window")):
        case = Case(arrays(Shape(1, 2, 1, lq, lk), "float32"), OPTIONS[option], {})
        yield f"{lq} {lk} {option}", right(case, compute(case))
    dims = (16, 40, 64, 72, 96, 128, 192, 256)
    for head_dim, v_dim, groups, dtype in around(9, dims, (16, 72, 256), (1, 2, 4), DTYPES):
        case = Case(arrays(Shape(1, max(groups, 2), groups, 9, 40, head_dim, v_dim), dtype), OPTIONS["causal"], {})
        yield f"{head_dim} {v_dim} {groups} {dtype}", right(case, compute(case))


def _by_integers(case: Case, tile: int = 16) -> tuple[Any, Any, Any]:
    """(dq by way of integers, dq in binary64, how far the integers may put it off)."""
    d, a, e, options = described(case), case.arrays, case.extra, case.options.validated("", case.arrays["q"].shape[-1])
    got = compute(case._replace(extra={k: x for k, x in e.items() if k != "dlse"}), tile=SMALL)
    tensors = {name: to_torch(x) for name, x in {**a, **e, "o": got["o"], "lse": got["lse"]}.items()}
    p, x = problem.problem_of(d, tensors["q"]), problem.extras(tensors)
    bounds_ = rows_launch.fill_bounds(p, tensors["k"], tensors["v"], x)
    given = [tensors["o"], tensors["do"], tensors["lse"], tensors.get("dlse")]
    rest = torch.full(a["q"].shape, 7, dtype=torch.int32)
    rows = rows_launch.fill_rows(p, *given, x, (bounds_, rest))
    assert not rest.any()
    integers = np.zeros((*a["q"].shape[:3], a["q"].shape[3]), np.int64)
    dq = np.zeros(integers.shape)
    wide = {name: x.astype(np.float64) for name, x in {**a, "o": got["o"], "lse": got["lse"]}.items()}
    groups = d.groups
    parts = [(0, slice(None), slice(None), slice(0, p.pitch))]
    if "cu_seqlens_q" in e:
        parts = []
        for n, i, j in reference.sequences((e["cu_seqlens_q"], e["cu_seqlens_k"])):
            slot = (i.start // 128 + n) * 128
            parts.append((n, i, j, slice(slot, slot + i.stop - i.start)))
    allowed = np.zeros(integers.shape)
    for n, i, j, at in parts:
        dense = reference.dense(wide["q"][:, :, i], wide["k"][:, :, j], wide["v"][:, :, j], options, first=n)
        delta = (wide["o"] * wide["do"])[:, :, i].sum(-1) - (e["dlse"][:, :, i] if "dlse" in e else 0)
        dp = dense.keep * (wide["do"][:, :, i] @ np.swapaxes(dense.v, 2, 3))
        ds = dense.probabilities(wide["lse"][:, :, i]) * (dp - delta[..., None]) * dense.slope
        count = ds.shape[2]
        row = rows.numpy()[2, :, :, at][:, :, :count].astype(np.float64)
        which = n if len(parts) > 1 else slice(None)
        keys = bounds_.numpy()[which, :, :-1][..., : a["q"].shape[3]]
        keys = keys.reshape(-1, *keys.shape[-2:])
        f = np.maximum(((keys.astype(np.int64) + 0x7FFFFF) >> 23) - 127, -126)
        column = np.repeat(2.0**-f, groups, 1)[:, :, None]
        with np.errstate(all="ignore"):
            for first in range(0, ds.shape[3], tile):
                step = ds[..., first : first + tile] @ dense.k[:, :, first : first + tile]
                integers[:, :, i] += np.rint(np.nan_to_num(step * column * row[..., None])).astype(np.int64)
            allowed[:, :, i] = abs(options.scale or 0) * -(-ds.shape[3] // tile) / 2 / (column * row[..., None])
        dq[:, :, i] = (options.scale or 0) * (ds @ dense.k)
    assert np.abs(integers).max() < 1 << 31
    result = torch.full_like(tensors["q"], 7)
    rows_launch.fixed_to_float(p, torch.from_numpy(integers.astype(np.int32)), rows, bounds_, result, x)
    return to_numpy(result).astype(np.float64), dq, allowed


def fixed() -> Iterator[tuple[str, bool]]:
    """Gradients of q by way of integers, which stay below 2^31: over many magnitudes, and rows that are not finite."""
    s = Shape(1, 2, 2, 40, 70, 16, 16)
    cases = [(option, Case(arrays(s, "bfloat16"), OPTIONS[option], {})) for option in OPTIONS]
    cases.append(("dlse", Case(arrays(s, "float16"), OPTIONS["causal"], extras(s, "float16")["dlse"])))
    for power, name in few(2, (-120, -60, 60, 110), ("do", "v", "k")):
        a = arrays(Shape(1, 1, 1, 40, 40, 16, 16), "bfloat16")
        scale = 2.0 ** (-power) if name == "k" else None  # scores of any use
        a[name] = (a[name].astype(np.float32) * 2.0**power).astype(NUMPY["bfloat16"])
        cases.append((f"{name} times 2^{power}", Case(a, AttentionOptions(causal=True, scale=scale), {})))
    a = arrays(Shape(1, 1, 1, 40, 40, 16, 16), "bfloat16")
    a["k"][..., 3] *= 1000
    a["do"][0, 0, :7] *= 0
    cases.append(("one large channel, rows of zeros", Case(a, AttentionOptions(scale=0.001), {})))
    starts = {"cu_seqlens_q": np.array([0, 20, 50], np.int32), "cu_seqlens_k": np.array([0, 33, 70], np.int32)}
    a = arrays(Shape(1, 2, 2, 50, 70, 16, 16), "bfloat16")
    a["v"][:, :, 33:] *= 100
    cases.append(("packed", Case(a, OPTIONS["window"], starts)))
    for what, case in cases:
        got, exact, allowed = _by_integers(case)
        ulps = np.abs(exact) * 2.0**-7 + 2.0**-126
        yield what, bool(np.all(np.abs(got - exact) <= allowed * 1.01 + ulps))
    for name, value in itertools.product(("q", "do", "k", "v"), (math.nan, math.inf)):
        a = arrays(Shape(1, 2, 2, 70, 50, 16, 16), "bfloat16")
        a[name][0, 0, 33, 2] = value
        marked = np.isnan(_by_integers(Case(a, AttentionOptions(), {}))[0]).all(-1)
        yield f"{name} {value}", bool(marked.all() if name in "kv" else marked.sum() == 1 and marked[0, 0, 33])


def packed() -> Iterator[tuple[str, bool]]:
    """Sequences one after the other have the bits that they have alone; so has a batch; strides leave no trace."""
    lengths = [(17, 33), (0, 5), (40, 40), (9, 0), (1, 2), (33, 70)]
    starts = [np.cumsum([0, *x]).astype(np.int32) for x in zip(*lengths, strict=True)]
    rng = np.random.default_rng(5)
    names = ("o", "lse", "dq", "dk", "dv")
    # Dropout depends on the sequence's number.
    for option, dtype in around(4, [o for o in OPTIONS if not OPTIONS[o].dropout_p], ("float32", "bfloat16")):
        parts = [arrays(Shape(1, 2, 2, *x, 16, 16), dtype, n) for n, x in enumerate(lengths)]
        sinks = {"sinks": rng.standard_normal(2).astype(np.float32)} if option in ("none", "window") else {}
        alone = [compute(Case(a, OPTIONS[option], sinks), tile=SMALL) for a in parts]
        rest = arrays(Shape(1, 2, 2, 7, 3, 16, 16), dtype)  # rows beyond the last sequence
        together = {name: np.concatenate([*(a[name] for a in parts), rest[name]], 2) for name in rest}
        case = Case(together, OPTIONS[option], {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]} | sinks)
        got = compute(case, tile=SMALL)
        for name in names:
            own = got[name][:, :, : -3 if name in ("dk", "dv") else -7]
            same = np.concatenate([x[name] for x in alone], 2).tobytes() == own.tobytes()
            yield f"{option} {dtype} {name}", same
        yield f"{option} {dtype}, beyond", not any(got[name][:, :, -3:].any() for name in names if name != "lse")
        yield f"{option} {dtype}, values", right(case, got)
        if sinks:  # what lies beyond the last sequence adds nothing, whatever it holds
            other = compute(case, tile=SMALL, behind=slice(starts[0][-1], None))
            yield f"{option} {dtype}, dsinks", other["dsinks"].tobytes() == got["dsinks"].tobytes()
    for dtype in ("float32", "bfloat16"):
        batch = arrays(Shape(3, 2, 1, 20, 40, 16, 16), dtype)
        whole = compute(Case(batch, OPTIONS["causal"], {}), tile=SMALL)
        one = compute(Case({k: x[1:2] for k, x in batch.items()}, OPTIONS["causal"], {}), tile=SMALL)
        yield f"batch {dtype}", all(one[name].tobytes() == whole[name][1:2].tobytes() for name in one)
        odd = compute(Case(batch, OPTIONS["causal"], {}), unaligned, SMALL)
        yield f"strides {dtype}", all(odd[name].tobytes() == whole[name].tobytes() for name in odd)


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
            compute(Case(arrays(Shape(1, 2, 1, 40, 40, 16, 16), "bfloat16"), OPTIONS["causal"], extra), tile=SMALL)
            yield f"{which} {bad}", _noted(which, position, value)


def _noted(which: str, position: int, value: int) -> bool:
    found = fault_flags.flag(torch.device("cpu"))
    number, place, what, _ = found.tolist()
    found.zero_()
    source = fault_flags._sources[number - 1]
    return (source.argument, place, what) == (which, position, value)


def delta() -> Iterator[tuple[str, bool]]:
    """Row sums of o * do have the bits of the reference."""
    for dtype, v_dim in few(2, DTYPES, (16, 40, 64, 96, 128, 256)):
        a = arrays(Shape(2, 2, 1, 33, 5, 16, v_dim), dtype)
        o, do = a["do"], arrays(Shape(2, 2, 1, 33, 5, 16, v_dim), dtype, 1)["do"]
        o[0, 0, 1, 2], do[0, 0, 2, 3], o[0, 0, 3], o[0, 0, 4, :2] = math.inf, math.nan, 0, (math.inf, -math.inf)
        do[0, 0, 4, :2], o[1, 1] = 1, (o[1, 1].astype(np.float32) * 2.0**-14).astype(o.dtype)
        tensors = {"o": to_torch(o), "do": to_torch(do), "delta": torch.full((2, 2, 33), 7.0)}
        launch.delta(AttentionDeltaDescriptor(2, 2, 33, v_dim, dtype).validated(), tensors)
        yield f"{dtype} {v_dim}", tensors["delta"].numpy().tobytes() == reference.attention_delta(o, do).tobytes()


SUITES = {f.__name__: f for f in (options, shapes, fixed, packed, dropout, faults, delta)}

if __name__ == "__main__":
    report(SUITES)
