"""Run under TRITON_INTERPRET=1: rows over a cache against the same rows of the forward pass of whole sequences.

    python interpreted_cache.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cached_sequences import Shape, Whole, cached, paged, same, whole
from choices import around, through
from interpreted_attention import SMALL, to_numpy, to_torch, unaligned
from interpreter_patches import report

from isograd.core import faults as fault_flags
from isograd.flash_attention import triton_launch
from isograd.flash_attention.descriptors import AttentionDescriptor, AttentionWithCacheDescriptor
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import triton_launch as order_free_launch

Results = tuple[Any, Any]


class Kernel(NamedTuple):
    """A launcher with a tile of a few rows, and the dtypes that it serves."""

    launch: Any
    tile: Any
    dtypes: tuple[str, ...]


KERNELS = {
    "triton": Kernel(triton_launch, SMALL, ("float32", "bfloat16", "float16")),
    "order_free": Kernel(order_free_launch, order_free_launch.Tile(64, 4, 1), ("bfloat16", "float16")),
}
OPTIONS = {
    "causal": AttentionOptions(causal=True),
    "window": AttentionOptions(causal=True, window=(20, None)),
    "softcap": AttentionOptions(causal=True, softcap=2.0),
    "negative scale": AttentionOptions(causal=True, scale=-0.2),
}


# --- running ---------------------------------------------------------------------------------------------------------
def _run(kernel: Kernel, descriptor: Any, given: dict[str, torch.Tensor]) -> Results:
    d = descriptor.validated()
    given |= {"o": torch.full(d.o_shape, 7.0, dtype=given["q"].dtype), "lse": torch.full(d.lse_shape, 7.0)}
    kernel.launch.forward(d, given, kernel.tile)
    return to_numpy(given["o"]), to_numpy(given["lse"])


def forward(kernel: Kernel, w: Whole, options: AttentionOptions) -> list[Results]:
    """(o, lse) of each sequence by itself."""
    found = []
    for q, k, v in zip(w.q, w.k, w.v, strict=True):
        sizes = (1, q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype.name)
        sinks = None if w.sinks is None else w.sinks.dtype.name
        given = {name: to_torch(x) for name, x in (("q", q), ("k", k), ("v", v))}
        given |= {} if w.sinks is None else {"sinks": to_torch(w.sinks)}
        found.append(_run(kernel, AttentionDescriptor(*sizes, options, sinks_dtype=sinks), given))
    return found


def with_cache(kernel: Kernel, arrays: dict[str, Any], options: AttentionOptions, change: Any = lambda t: t) -> Results:
    """(o, lse) of the arrays of `cached` or `paged`; `change` gives k and v other strides."""
    q, k, v, table = arrays["q"], arrays["k"], arrays["v"], arrays.get("block_table")
    capacity = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], capacity, q.shape[3], v.shape[3], q.dtype.name)
    pages = {} if table is None else {"page_size": k.shape[2], "pages": k.shape[0]}
    sinks = arrays["sinks"].dtype.name if "sinks" in arrays else None
    given = {name: to_torch(x) for name, x in arrays.items()}
    given |= {name: change(given[name]) for name in ("k", "v")}
    return _run(kernel, AttentionWithCacheDescriptor(*sizes, options, sinks_dtype=sinks, **pages), given)


# --- suites ----------------------------------------------------------------------------------------------------------
def _options(name: str) -> Iterator[tuple[str, bool]]:
    kernel = KERNELS[name]
    calls = ((1, [150, 97, 0, 1]), (3, [129, 64, 0, 2]), (40, [128, 65, 0, 33]))
    chosen = through(list(OPTIONS), kernel.dtypes, (1, 2), (False, True))
    for number, (option, dtype, groups, sinks) in enumerate(chosen):
        w = whole(Shape((150, 97, 0, 33), 2 * groups, 2, 24, 16), dtype, sinks)
        expected = forward(kernel, w, OPTIONS[option])
        for n, page_size in enumerate((None, 1, 16, 20)):
            rows, lengths = calls[(number + n) % len(calls)]
            arrays = cached(w, lengths, rows, 160) if page_size is None else paged(w, lengths, rows, page_size)
            got = with_cache(kernel, arrays, OPTIONS[option])
            yield f"{option} {dtype} {groups} {sinks} {rows} {page_size}", same(expected, got, arrays)


def _growth(name: str) -> Iterator[tuple[str, bool]]:
    """A sequence that grows by a token at a time, in any layout."""
    kernel = KERNELS[name]
    w = whole(Shape((140,), 2, 1, 16, 24), "bfloat16", False)
    expected = forward(kernel, w, OPTIONS["causal"])
    changes = (lambda t: t, unaligned, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))
    for length in (*range(1, 141, 9), 127, 128, 129):
        for n, page_size in enumerate((None, 8)):
            arrays = cached(w, [length], 1, 144) if page_size is None else paged(w, [length], 1, page_size)
            got = with_cache(kernel, arrays, OPTIONS["causal"], changes[(length + n) % 3])
            yield f"{length} {page_size}", same(expected, got, arrays)


def _shapes(name: str) -> Iterator[tuple[str, bool]]:
    """Head dimensions and lengths with the tiles of the rule."""
    kernel = KERNELS[name]._replace(tile=None)
    for head_dim, v_dim, dtype in around(4, (16, 40, 128, 256), (16, 72, 256), kernel.dtypes):
        w = whole(Shape((190, 61), 2, 1, head_dim, v_dim), dtype, True)
        expected = forward(kernel, w, OPTIONS["window"])
        for lengths, arrays in (([190, 61], cached(w, [190, 61], 2, 200)), ([130, 5], paged(w, [130, 5], 2, 16))):
            got = with_cache(kernel, arrays, OPTIONS["window"])
            yield f"{head_dim} {v_dim} {dtype} {lengths}", same(expected, got, arrays)


def _faults(name: str) -> Iterator[tuple[str, bool]]:
    """What is out of range is noted, makes NaN of the rows of its sequence, and leaves the others as they are."""
    kernel = KERNELS[name]
    w = whole(Shape((50, 30, 20), 2, 2, 16, 16), "bfloat16", True)
    expected, lengths, options = forward(kernel, w, OPTIONS["causal"]), [50, 30, 20], OPTIONS["causal"]
    for what, value in (("cache_seqlens", -1), ("cache_seqlens", 65), ("block_table", -1), ("block_table", 1 << 30)):
        arrays = paged(w, lengths, 2, 16) if what == "block_table" else cached(w, lengths, 2, 64)
        place = (1, 1) if what == "block_table" else (1,)
        arrays[what][place] = value
        o, lse = with_cache(kernel, arrays, options)
        others = same(expected, (o, lse), arrays, sequences=(0, 2))
        broken = bool(np.isnan(o[1].astype(np.float32)).all() and np.isnan(lse[1]).all())
        at = arrays["block_table"].shape[1] + 1 if what == "block_table" else 1
        yield f"{what} {value}", others and broken and _noted(what, at, value)


def _noted(which: str, position: int, value: int) -> bool:
    found = fault_flags.flag(torch.device("cpu"))
    number, place, what, _ = found.tolist()
    found.zero_()
    return bool(number) and (fault_flags._sources[number - 1].argument, place, what) == (which, position, value)


SUITES = {
    f"{kernel}_{suite.__name__.strip('_')}": (lambda kernel=kernel, suite=suite: suite(kernel))
    for suite in (_options, _growth, _shapes, _faults)
    for kernel in KERNELS
}

if __name__ == "__main__":
    report(SUITES)
