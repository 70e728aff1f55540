"""Sequences as a whole, and what a cache holds of them: contiguous, or in pages in any order."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Shape(NamedTuple):
    """The lengths of sequences, heads of q, of k and v, and head dimensions."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    v_dim: int = 24


class Whole(NamedTuple):
    """Of each sequence q [1, Hq, L, D], k [1, Hkv, L, D] and v [1, Hkv, L, Dv], and the sinks of all, or None."""

    q: list[Any]
    k: list[Any]
    v: list[Any]
    sinks: Any


def whole(shape: Shape, dtype: str, sinks: bool = False, seed: int = 0) -> Whole:
    """Random sequences."""
    rng = np.random.default_rng(seed)

    def rows(heads: int, size: int) -> list[Any]:
        return [rng.standard_normal((1, heads, n, size)).astype(NUMPY[dtype]) for n in shape.lengths]

    found = rows(shape.heads, shape.head_dim), rows(shape.kv_heads, shape.head_dim), rows(shape.kv_heads, shape.v_dim)
    return Whole(*found, rng.standard_normal(shape.heads).astype(NUMPY[dtype]) if sinks else None)


def _common(w: Whole, lengths: list[int], rows: int) -> dict[str, Any]:
    """The last `rows` queries before each length, NaN in front of a sequence's first; lengths; sinks."""
    q = np.full((len(lengths), w.q[0].shape[1], rows, w.q[0].shape[3]), np.nan, w.q[0].dtype)
    for n, length in enumerate(lengths):
        there = min(rows, length)
        q[n, :, rows - there :] = w.q[n][0, :, length - there : length]
    found = {"q": q, "cache_seqlens": np.array(lengths, np.int32)}
    return found if w.sinks is None else found | {"sinks": w.sinks}


def cached(w: Whole, lengths: list[int], rows: int, capacity: int) -> dict[str, Any]:
    """The operands of a contiguous cache [B, Hkv, capacity, size], NaN behind each length."""
    found = _common(w, lengths, rows)
    for name, parts in (("k", w.k), ("v", w.v)):
        cache = np.full((len(lengths), parts[0].shape[1], capacity, parts[0].shape[3]), np.nan, parts[0].dtype)
        for n, length in enumerate(lengths):
            cache[n, :, :length] = parts[n][0, :, :length]
        found[name] = cache
    return found


def paged(w: Whole, lengths: list[int], rows: int, page_size: int, seed: int = 0) -> dict[str, Any]:
    """The operands of a cache of pages in random order, NaN where no key is; unused places of the table are -7."""
    found = _common(w, lengths, rows)
    needed = [-(-length // page_size) for length in lengths]
    most, total = max(needed, default=0) + 1, sum(needed) + 3
    order = iter(np.random.default_rng(seed).permutation(total))
    table = np.full((len(lengths), most), -7, np.int32)
    for n, count in enumerate(needed):
        table[n, :count] = [next(order) for _ in range(count)]
    for name, parts in (("k", w.k), ("v", w.v)):
        heads, size = parts[0].shape[1], parts[0].shape[3]
        cache = np.full((total, heads, page_size, size), np.nan, parts[0].dtype)
        for n, length in enumerate(lengths):
            for first in range(0, length, page_size):
                rows_ = parts[n][0, :, first : min(first + page_size, length)]
                cache[table[n, first // page_size], :, : rows_.shape[1]] = rows_
        found[name] = cache
    return found | {"block_table": table}


def same(expected: list[Any], got: tuple[Any, Any], arrays: dict[str, Any], sequences: Any = None) -> bool:
    """Whether (o, lse) have the bits of the last rows before each length of what whole sequences gave by themselves.

    Rows in front of a sequence see nothing but a sink. sequences: those that are looked at.
    """
    rows, sinks, fine = arrays["q"].shape[2], arrays.get("sinks"), []
    alone = -np.inf if sinks is None else sinks.astype(np.float64)[:, None]
    for n in range(len(expected)) if sequences is None else sequences:
        length = int(arrays["cache_seqlens"][n])
        there = min(rows, length)
        for x, y in zip(expected[n], got, strict=True):
            fine.append(x[0, :, length - there : length].tobytes() == y[n, :, rows - there :].tobytes())
        before = [x[n, :, : rows - there] for x in got]
        fine += [not before[0].any(), bool(np.all(np.isclose(before[1], alone, 1e-5, 1e-5)))]
    return all(fine)
