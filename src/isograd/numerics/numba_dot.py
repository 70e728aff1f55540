# mypy: ignore-errors
"""Tiles of exact integer products on the CPU: words of terms times words of digits, added in int32.

An integer of 16 bits is 256 h + l with two digits of a signed byte, and a word of 32 bits holds two integers or four
digits. Σ A B is 256 Σ A h + Σ A l, or 65536 Σ h h + 256 Σ (h l + l h) + Σ l l. Sums of TERMS products stay below 2^31:
508 · 32,639 · 128 < 2^31. The sums of more terms are added in int64. Every engine returns the same integers; none
saturates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from isograd.runtime.numba_compile import INLINED, processor_features

TERMS = 508  # a multiple of what a word of any engine holds
AHEAD = 64  # bytes: a line of a cache
_OCTETS, _WORD, _LONG = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


class Engine(NamedTuple):
    """How a processor multiplies words.

    needs: the features of the processor. lanes: columns of a tile, rows: its rows, whose sums registers hold. dot:
    (builder, sums, words, words) -> sums. like: what a kernel gets to know its engine by the type. element: what fills
    words, integers of 16 bits or digits. by_lane: an instruction takes a word of a from a lane of a register, and else
    from memory.
    """

    name: str
    like: Any
    needs: tuple[str, ...]
    lanes: int
    rows: int
    dot: Callable[..., Any]
    element: Any = np.int16(0)
    by_lane: bool = False

    @property
    def digits(self) -> int:
        """Words that hold the terms of a; b always has two."""
        return 2 // self.element.itemsize


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _accumulate(name: str) -> Callable[..., Any]:
    def dot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
        return builder.call(_declared(builder, name, sums.type, [sums.type] * 3), [sums, a, b])

    return dot


def _multiply_add(name: str) -> Callable[..., Any]:
    def dot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * sums.type.count)
        function = _declared(builder, name, sums.type, [halves] * 2)
        return builder.add(sums, builder.call(function, [builder.bitcast(x, halves) for x in (a, b)]))

    return dot


def _sdot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    octets, wide = (ir.VectorType(ir.IntType(size), 16) for size in (8, 32))
    a, b = (builder.bitcast(x, octets) for x in (a, b))
    if builder.module.triple.startswith(("aarch64", "arm64")):
        function = _declared(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, [sums.type, octets, octets])
        return builder.call(function, [sums, b, a])
    # What it means, for tests on other processors.
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    for i in range(4):
        places = ir.Constant(sums.type, [_WORD(4 * lane + i) for lane in range(4)])
        sums = builder.add(sums, builder.shuffle_vector(products, products, places))
    return sums


def _by_pairs(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    lanes = sums.type.count
    halves, wide = (ir.VectorType(ir.IntType(size), 2 * lanes) for size in (16, 32))
    products = builder.mul(*(builder.sext(builder.bitcast(x, halves), wide) for x in (a, b)))
    for i in range(2):
        places = ir.Constant(sums.type, [_WORD(2 * lane + i) for lane in range(lanes)])
        sums = builder.add(sums, builder.shuffle_vector(products, products, places))
    return sums


ENGINES = (
    Engine("avx512_vnni", np.uint8(0), ("avx512f", "avx512vnni"), 16, 12, _accumulate("llvm.x86.avx512.vpdpwssd.512")),
    Engine("avx512", np.uint16(0), ("avx512f", "avx512bw"), 16, 12, _multiply_add("llvm.x86.avx512.pmaddw.d.512")),
    Engine("avx2", np.uint32(0), ("avx2",), 8, 6, _multiply_add("llvm.x86.avx2.pmadd.wd")),
    Engine("dotprod", np.int8(0), ("dotprod",), 4, 8, _sdot, np.int8(0), True),
)

# For any processor; a BLAS is faster where a whole product is at hand.
PORTABLE = Engine("portable", np.int16(0), (), 4, 4, _by_pairs)


def engines() -> list[Engine]:
    """The engines of this machine, the fastest first."""
    features = processor_features()
    return [engine for engine in ENGINES if features.issuperset(engine.needs)]


def tile_code(engine: Engine, builder: Any, a: Any, b: Any, groups: Any, z: Any, ahead: Any) -> None:
    """Add the products of a tile to int64 sums z [rows, lanes].

    a: words [groups, digits, rows]; b: words of digits [groups, 2, lanes]; h before l in both. groups: at least 1, with
    at most TERMS terms. ahead: what is needed next, AHEAD bytes a group, which the second-level cache gets meanwhile;
    it may lie beyond the end of memory. a, b, z and ahead are pointers.
    """
    rows, lanes, digits = engine.rows, engine.lanes, engine.digits
    words, longs = ir.VectorType(_WORD, lanes), ir.VectorType(_LONG, lanes)

    def splat(vector: Any, lane: int) -> Any:
        undefined = ir.Constant(vector.type, ir.Undefined)
        return builder.shuffle_vector(vector, undefined, ir.Constant(words, [_WORD(lane)] * lanes))

    def load(base: Any, index: int, kind: Any, align: int) -> Any:
        vector = builder.load(builder.bitcast(builder.gep(base, [_LONG(index)]), kind.as_pointer()))
        vector.align = align
        return vector

    def word(base: Any, index: int) -> Any:
        """A word in all lanes."""
        scalar = builder.load(builder.gep(base, [_LONG(index)]))
        return splat(builder.insert_element(ir.Constant(words, ir.Undefined), scalar, _WORD(0)), 0)

    def left_words(base: Any) -> list[Any]:
        count = digits * rows
        if not engine.by_lane:
            return [word(base, i) for i in range(count)]
        held = [load(base, i, words, 4) for i in range(0, count, lanes)]
        return [splat(held[i // lanes], i % lanes) for i in range(count)]

    before = builder.block
    loop, done = builder.append_basic_block("groups"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, at_a, at_b = builder.phi(_LONG), builder.phi(a.type), builder.phi(b.type)
    sums = [[builder.phi(words) for _ in range(digits + 1)] for _ in range(rows)]
    after = [list(row) for row in sums]
    line = builder.gep(builder.bitcast(ahead, _OCTETS), [builder.mul(k, _LONG(AHEAD))])
    prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), [_OCTETS, _WORD, _WORD, _WORD])
    builder.call(prefetch, [line, _WORD(0), _WORD(2), _WORD(1)])  # to read, second level, data
    left, right = left_words(at_a), [load(at_b, j * lanes, words, 4) for j in range(2)]
    for p in range(digits):
        for i in range(rows):
            for j in range(2):
                after[i][p + j] = engine.dot(builder, after[i][p + j], left[p * rows + i], right[j])
    advanced = (
        builder.add(k, _LONG(1)),
        builder.gep(at_a, [_LONG(digits * rows)]),
        builder.gep(at_b, [_LONG(2 * lanes)]),
    )
    for phi, first, later in zip((k, at_a, at_b), (_LONG(0), a, b), advanced, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    for row, summed in zip(sums, after, strict=True):
        for phi, later in zip(row, summed, strict=True):
            phi.add_incoming(ir.Constant(words, None), before)
            phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", advanced[0], groups), loop, done)
    builder.position_at_end(done)
    for i in range(rows):
        total = load(z, i * lanes, longs, 8)
        for weight, part in enumerate(reversed(after[i])):
            shift = ir.Constant(longs, [_LONG(8 * weight)] * lanes)
            total = builder.add(total, builder.shl(builder.sext(part, longs), shift))
        to = builder.bitcast(builder.gep(z, [_LONG(i * lanes)]), longs.as_pointer())
        builder.store(total, to).align = 8


def _tile(engine: Engine) -> Any:
    def add_products(typingctx: Any, a: Any, b: Any, groups: Any, z: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            tile_code(engine, builder, *arguments)
            return context.get_dummy_value()

        return types.void(a, b, groups, z, ahead), generate

    return intrinsic(add_products)


_BY_TYPE = {numba.typeof(engine.like): engine for engine in (*ENGINES, PORTABLE)}
_TILES = {kind: _tile(engine) for kind, engine in _BY_TYPE.items()}


def tile_rows(engine: Any) -> Any:
    raise NotImplementedError


@overload(tile_rows, jit_options=INLINED)
def _tile_rows(engine):
    rows = _BY_TYPE[engine].rows
    return lambda engine: np.int64(rows)


def tile_lanes(engine: Any) -> Any:
    raise NotImplementedError


@overload(tile_lanes, jit_options=INLINED)
def _tile_lanes(engine):
    lanes = _BY_TYPE[engine].lanes
    return lambda engine: np.int64(lanes)


def word_terms(element: Any) -> Any:
    """How many a word holds."""
    raise NotImplementedError


@overload(word_terms, jit_options=INLINED)
def _word_terms(element):
    terms = 32 // element.bitwidth
    return lambda element: np.int64(terms)


def add_products(engine: Any, a: Any, b: Any, groups: Any, z: Any, ahead: Any) -> Any:
    """Add the products of a tile to its sums: see `tile_code`."""
    raise NotImplementedError


@overload(add_products, jit_options=INLINED)
def _add_products(engine, a, b, groups, z, ahead):
    tile = _TILES[engine]
    return lambda engine, a, b, groups, z, ahead: tile(a, b, groups, z, ahead)
