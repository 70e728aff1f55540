"""The cases of attention, its gradients and the row sums in between, and what must not change their bits.

o and lse of the backward's cases are made up: their exact values would come from a library's exp. Every formula of the
backward holds for any o and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from isograd.core.cases import Array, Arrays, Case, Change, Suite, normal, store
from isograd.core.descriptor import Descriptor
from isograd.flash_attention import reference
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDeltaDescriptor,
    AttentionDescriptor,
    AttentionWithCacheDescriptor,
    work_type,
)
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import reference as order_free
from isograd.flash_attention.plans import (
    ORDER_FREE_DTYPES,
    AttentionBackwardPlan,
    AttentionDeltaPlan,
    AttentionPlan,
    AttentionWithCachePlan,
)
from isograd.flash_attention.problem import sizes
from isograd.numerics import random


class _Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    v_dim: int


_SMALL = _Shape(2, 4, 2, 70, 150, 16, 24)
_PACKED = _Shape(1, 2, 1, 90, 160, 40, 32)
_OPTIONS: tuple[tuple[str, _Shape, AttentionOptions, tuple[str, ...]], ...] = (
    ("full", _Shape(2, 2, 2, 130, 130, 64, 64), AttentionOptions(), ()),
    ("one query", _Shape(2, 4, 1, 1, 200, 72, 72), AttentionOptions(causal=True), ()),
    ("three keys", _Shape(2, 3, 3, 70, 3, 16, 16), AttentionOptions(scale=0.125), ()),
    ("causal, grouped heads", _SMALL, AttentionOptions(causal=True), ()),
    ("causal, upper left", _SMALL, AttentionOptions(causal=True, window=(9, None), alignment="upper_left"), ()),
    ("rows that see nothing", _Shape(2, 4, 2, 150, 70, 16, 24), AttentionOptions(causal=True), ()),
    ("window, softcap", _SMALL, AttentionOptions(window=(20, 5), softcap=1.5), ()),
    ("bias and sinks", _SMALL, AttentionOptions(), ("bias", "sinks")),
    ("mask", _SMALL, AttentionOptions(scale=0.5), ("mask",)),
    ("segments", _SMALL, AttentionOptions(causal=True), ("segments",)),
    ("packed, dropout", _PACKED, AttentionOptions(causal=True, dropout_p=0.25, seed=12345678901), ("packed", "sinks")),
)  # fmt: skip


def _optional(shape: _Shape, present: tuple[str, ...], dtype: str, stream: int) -> dict[str, Array]:
    scores = (shape.batch, shape.heads, shape.q_length, shape.k_length)
    found = {}
    if "bias" in present:
        found["bias"] = store(normal((1, shape.heads, 1, shape.k_length), stream), dtype)
    if "sinks" in present:
        found["sinks"] = store(normal((shape.heads,), stream + 1), dtype)
    if "mask" in present:
        found["mask"] = normal((scores[0], 1, *scores[2:]), stream + 2) > 0.5
    if "segments" in present:
        for name, length in (("q_segment_ids", shape.q_length), ("k_segment_ids", shape.k_length)):
            found[name] = np.tile(np.arange(length, dtype=np.int32) * 3 // length, (shape.batch, 1))
    if "packed" in present:
        found["cu_seqlens_q"] = np.array([0, 20, 20, 65, 85], np.int32)
        found["cu_seqlens_k"] = np.array([0, 3, 30, 150, 150], np.int32)
    return found


def _forward_cases(dtype: str) -> Iterator[Case]:
    for stream, (name, shape, options, present) in enumerate(_OPTIONS):
        stream = 800 + 20 * stream
        b, h, g, n, m, d, e = shape
        inputs = {
            "q": store(normal((b, h, n, d), stream), dtype),
            "k": store(normal((b, g, m, d), stream + 1), dtype),
            "v": store(normal((b, g, m, e), stream + 2), dtype),
            **_optional(shape, present, dtype, stream + 3),
        }
        yield Case(name, inputs, {"options": options})


def _backward_cases(dtype: str) -> Iterator[Case]:
    for stream, case in enumerate(_forward_cases(dtype)):
        stream = 810 + 20 * stream
        q, v = case.inputs["q"], case.inputs["v"]
        shape = (*q.shape[:3], v.shape[3])
        inputs = {
            "do": store(normal(shape, stream), dtype),
            **case.inputs,
            "o": store(normal(shape, stream + 1), dtype),
            "lse": store(5 + 0.25 * normal(shape[:3], stream + 2), work_type(dtype)),
            "dlse": store(normal(shape[:3], stream + 3), work_type(dtype)),
        }
        yield Case(case.name, inputs, case.options)


def _delta_cases(dtype: str) -> Iterator[Case]:
    for stream, shape in enumerate(((2, 3, 40, 16), (1, 2, 33, 64), (1, 1, 20, 256)), 990):
        inputs = {"o": store(normal(shape, stream), dtype), "do": store(1e3 * normal(shape, stream + 3), dtype)}
        yield Case(" x ".join(map(str, shape)), inputs)
    rows = store(normal((1, 1, 30, 64), 993), dtype)
    rows[..., 32:] = rows[..., :32]
    signs = np.where(np.arange(64) < 32, 1.0, -1.0)
    others = np.ldexp(np.tile(normal((1, 1, 30, 32), 994), 2) * signs, np.arange(30)[:, None] - 20)
    yield Case("terms that cancel", {"o": rows, "do": store(others, dtype)})
    special = normal((1, 1, 5, 16), 998).copy()
    special[0, 0, range(3), [0, 7, 15]] = [np.nan, np.inf, -np.inf]
    special[0, 0, 3, :2] = [np.inf, -np.inf]
    yield Case("NaN and inf", {"o": store(special, dtype), "do": store(np.abs(normal((1, 1, 5, 16), 999)), dtype)})


class _Cache(NamedTuple):
    """Keys of sequences, queries of each, room for keys, and rows of a page, None for a contiguous cache."""

    lengths: tuple[int, ...]
    queries: int
    room: int
    page_size: int | None


_CACHES: tuple[tuple[str, _Cache, _Shape, AttentionOptions], ...] = (
    ("one query", _Cache((200, 1, 129), 1, 260, None), _Shape(3, 4, 2, 1, 0, 64, 64), AttentionOptions(True)),
    ("five queries", _Cache((150, 0, 3), 5, 150, None), _Shape(3, 4, 1, 5, 0, 16, 24), AttentionOptions(True)),
    ("window, softcap", _Cache((140, 64), 2, 140, None), _Shape(2, 2, 2, 2, 0, 40, 32),
     AttentionOptions(True, window=(70, None), softcap=1.5)),
    ("many queries", _Cache((150, 70), 70, 150, None), _Shape(2, 4, 2, 70, 0, 16, 24), AttentionOptions(True)),
    ("pages", _Cache((130, 33, 0), 1, 144, 16), _Shape(3, 4, 2, 1, 0, 64, 64), AttentionOptions(True)),
    ("pages, window", _Cache((130, 33), 3, 140, 7), _Shape(2, 4, 4, 3, 0, 16, 24),
     AttentionOptions(True, window=(40, None), scale=0.5)),
)  # fmt: skip


def _cache_cases(dtype: str) -> Iterator[Case]:
    for stream, (name, cache, shape, options) in enumerate(_CACHES):
        stream = 1100 + 20 * stream
        b, h, g, n, _, d, e = shape
        inputs = {"q": store(normal((b, h, n, d), stream), dtype)}
        size = cache.room
        if cache.page_size is not None:
            each = cache.room // cache.page_size
            inputs["block_table"] = random.permutation(b * each, seed=5).reshape(b, each).astype(np.int32)
            b, size = b * each, cache.page_size
        inputs |= {
            "k": store(normal((b, g, size, d), stream + 1), dtype),
            "v": store(normal((b, g, size, e), stream + 2), dtype),
            "cache_seqlens": np.array(cache.lengths, np.int32),
        }
        if options.window:
            inputs["sinks"] = store(normal((h,), stream + 3), dtype)
        yield Case(name, inputs, {"options": options})


# --- what runs them --------------------------------------------------------------------------------------------------
def _fields(case: Case, dtype: str) -> dict[str, Any]:
    a = case.inputs
    shapes = {f"{name}_shape": a[name].shape for name in ("bias", "mask") if name in a}
    types = {f"{name}_dtype": dtype for name in ("bias", "sinks") if name in a}
    return {
        **sizes(a["q"], a["k"], a["v"]),
        "dtype": dtype,
        "segments": "q_segment_ids" in a,
        "sequences": len(a["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in a else None,
        **shapes,
        **types,
        **case.options,
    }


def _forward_descriptor(case: Case, dtype: str) -> Descriptor:
    return AttentionDescriptor(**_fields(case, dtype))


def _backward_descriptor(case: Case, dtype: str) -> Descriptor:
    fields = _fields(case, dtype)
    fields |= {"dlse": True, "dbias": "bias" in case.inputs, "dsinks": "sinks" in case.inputs}
    return AttentionBackwardDescriptor(**fields)


def _delta_descriptor(case: Case, dtype: str) -> Descriptor:
    batch, heads, length, v_dim = case.inputs["o"].shape
    return AttentionDeltaDescriptor(batch, heads, length, v_dim, dtype)


def _cache_descriptor(case: Case, dtype: str) -> Descriptor:
    a = case.inputs
    fields = {**sizes(a["q"], a["k"], a["v"]), "dtype": dtype, **case.options}
    if "block_table" in a:
        pages, _, page_size, _ = a["k"].shape
        fields |= {"k_length": a["block_table"].shape[1] * page_size, "page_size": page_size, "pages": pages}
    return AttentionWithCacheDescriptor(**fields, sinks_dtype=dtype if "sinks" in a else None)


def _oracle(options: AttentionOptions, q: Array, k: Array, v: Array, **operands: Array) -> Arrays:
    return reference.oracle_attention(q, k, v, options, reference.inputs_of(operands))


def _oracle_backward(
    options: AttentionOptions, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dlse: Array,
    **operands: Array,
) -> Arrays:  # fmt: skip
    inputs = reference.inputs_of(operands)
    found = reference.oracle_attention_backward(do, q, k, v, options, inputs, dlse, o, lse)
    return tuple([x for x in found if x is not None])


def _definition(options: AttentionOptions, q: Array, k: Array, v: Array, **operands: Array) -> Arrays | None:
    """The bits of the order-free kernels, where there are such."""
    if q.dtype.name not in ORDER_FREE_DTYPES:
        return None
    return order_free.attention(q, k, v, options, reference.inputs_of(operands))


def _oracle_with_cache(
    options: AttentionOptions, q: Array, k: Array, v: Array, cache_seqlens: Array, **operands: Array
) -> Arrays:
    def oracle(q: Array, k: Array, v: Array, options: AttentionOptions, **rest: Array) -> Arrays:
        return _oracle(options, q, k, v, **rest)

    return reference.over_cache(oracle, q, k, v, cache_seqlens, options, **operands)


def _definition_with_cache(
    options: AttentionOptions, q: Array, k: Array, v: Array, cache_seqlens: Array, **operands: Array
) -> Arrays | None:
    if q.dtype.name not in ORDER_FREE_DTYPES:
        return None

    def definition(q: Array, k: Array, v: Array, options: AttentionOptions, **rest: Array) -> Arrays:
        return order_free.attention(q, k, v, options, reference.inputs_of(rest))

    return reference.over_cache(definition, q, k, v, cache_seqlens, options, **operands)


def _definition_backward(
    options: AttentionOptions, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dlse: Array,
    **operands: Array,
) -> Arrays | None:  # fmt: skip
    if q.dtype.name not in ORDER_FREE_DTYPES or "bias" in operands:
        return None
    inputs = reference.inputs_of(operands)
    found = order_free.attention_backward(do, q, k, v, o, lse, options, inputs, dlse)
    return tuple([x for x in found if x is not None])


def _oracle_delta(o: Array, do: Array) -> Array:
    with np.errstate(all="ignore"):
        total: Array = (o.astype(np.longdouble) * do.astype(np.longdouble)).sum(axis=-1)
    return total


# --- what must not change a bit --------------------------------------------------------------------------------------
_BATCHED = ("do", "q", "k", "v", "o", "lse", "dlse", "q_segment_ids", "k_segment_ids", "mask")


def _batch(rows: int) -> Callable[[Case], Iterator[Change]]:
    """The last sequence of a batch alone, where dropout does not know its number; `rows` results have its rows."""

    def changes(case: Case) -> Iterator[Change]:
        if case.options["options"].dropout_p or "cu_seqlens_q" in case.inputs:
            return
        inputs = {name: a[-1:] if name in _BATCHED else a for name, a in case.inputs.items()}
        yield Change(
            Case(case.name, inputs, case.options),
            lambda results: tuple(x[-1:] for x in results[:rows]),
            lambda results: results[:rows],
        )

    return changes


def _blhd(a: Array) -> Array:
    """The same values with rows of all heads side by side, and a gap between them."""
    wide = np.zeros((a.shape[0], a.shape[2], a.shape[1], a.shape[3] + 8), a.dtype).transpose(0, 2, 1, 3)
    view = wide[..., : a.shape[3]]
    view[...] = a
    return view


def _layout(case: Case) -> Iterator[Change]:
    """The same values in other strides."""
    rows = ("do", "q", "k", "v", "o")
    inputs = {name: _blhd(a) if name in rows else a for name, a in case.inputs.items()}
    yield Change(Case(case.name, inputs, case.options))


def _order(rows: int) -> Callable[[Case], Iterator[Change]]:
    """Keys in another order within blocks, where no position hides one; results after `rows` have rows of keys."""

    def changes(case: Case) -> Iterator[Change]:
        options = case.options["options"]
        if options.causal or options.window or options.dropout_p or "cu_seqlens_k" in case.inputs:
            return
        length = case.inputs["k"].shape[2]
        starts = range(0, length, order_free.BLOCK)
        sizes_ = [min(order_free.BLOCK, length - start) for start in starts]
        parts = [start + random.permutation(n, seed=4) for start, n in zip(starts, sizes_, strict=True)]
        order = np.concatenate(parts)
        inputs = dict(case.inputs)
        for name, axis in (("k", 2), ("v", 2), ("bias", 3), ("mask", 3), ("k_segment_ids", 1)):
            if name in inputs and inputs[name].shape[axis] > 1:
                inputs[name] = np.take(inputs[name], order, axis)

        def expected(results: Arrays) -> Arrays:
            return (*results[:rows], *(np.take(x, order, 2) for x in results[rows : rows + 2]), *results[rows + 2 :])

        yield Change(Case(case.name, inputs, case.options), expected)

    return changes


def _cache_batch(case: Case) -> Iterator[Change]:
    """The last sequence alone."""
    own = ("q", "cache_seqlens", "block_table") if "block_table" in case.inputs else ("q", "k", "v", "cache_seqlens")
    inputs = {name: a[-1:] if name in own else a for name, a in case.inputs.items()}
    yield Change(Case(case.name, inputs, case.options), lambda results: tuple(x[-1:] for x in results))


def _cache_padding(case: Case) -> Iterator[Change]:
    """More room behind the keys, and pages in another order."""
    inputs = dict(case.inputs)
    if "block_table" not in inputs:
        wider = {name: np.pad(inputs[name], ((0, 0), (0, 0), (0, 9), (0, 0))) for name in ("k", "v")}
        yield Change(Case(case.name, inputs | wider, case.options))
        return
    order = random.permutation(len(inputs["k"]), seed=6)
    inputs |= {name: inputs[name][order] for name in ("k", "v")}
    inputs["block_table"] = np.argsort(order)[inputs["block_table"]].astype(np.int32)
    yield Change(Case(case.name, inputs, case.options))


def _delta_batch(case: Case) -> Iterator[Change]:
    half = case.inputs["o"].shape[2] // 2
    inputs = {name: a[:, :, half:] for name, a in case.inputs.items()}
    yield Change(Case(case.name, inputs), lambda results: (results[0][:, :, half:],))


def _delta_order(case: Case) -> Iterator[Change]:
    order = random.permutation(case.inputs["o"].shape[3], seed=3)
    yield Change(Case(case.name, {name: a[..., order] for name, a in case.inputs.items()}))


def _delta_padding(case: Case) -> Iterator[Change]:
    if case.inputs["o"].shape[3] < 256:
        pad = ((0, 0), (0, 0), (0, 0), (0, 8))
        yield Change(Case(case.name, {name: np.pad(a, pad) for name, a in case.inputs.items()}))


_DELTA_CHANGES: Mapping[str, Callable[[Case], Iterator[Change]]] = {
    "batch": _delta_batch,
    "order": _delta_order,
    "layout": _layout,
    "padding": _delta_padding,
}
SUITES: dict[str, Suite] = {
    "attention": Suite(
        AttentionPlan,
        _forward_descriptor,
        _definition,
        _oracle,
        _forward_cases,
        {"batch": _batch(2), "order": _order(2), "layout": _layout},
    ),
    "attention_backward": Suite(
        AttentionBackwardPlan,
        _backward_descriptor,
        _definition_backward,
        _oracle_backward,
        _backward_cases,
        {"batch": _batch(3), "order": _order(1), "layout": _layout},
    ),
    "attention_with_cache": Suite(
        AttentionWithCachePlan,
        _cache_descriptor,
        _definition_with_cache,
        _oracle_with_cache,
        _cache_cases,
        {"batch": _cache_batch, "layout": _layout, "padding": _cache_padding},
    ),
    "attention_delta": Suite(
        AttentionDeltaPlan,
        _delta_descriptor,
        reference.attention_delta,
        _oracle_delta,
        _delta_cases,
        _DELTA_CHANGES,
    ),
}
