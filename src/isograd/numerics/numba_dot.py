# mypy: ignore-errors
"""Tiles of exact integer products on the CPU: pairs of 16-bit integers times pairs of digits, added in int32.

An integer B of 16 bits is 256 h + l with two digits of a signed byte, so Σ A B = 256 Σ A h + Σ A l, and TERMS products
of an integer and a digit stay below 2^31: 510 · 32,639 · 128 < 2^31. The sums of more terms are added in int64. Every
engine returns the same integers; none saturates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from isograd.runtime.numba_compile import INLINED, processor_features

TERMS = 510
_WORD, _LONG = ir.IntType(32), ir.IntType(64)


class Engine(NamedTuple):
    """How a processor multiplies pairs.

    needs: the features of the processor. lanes: columns of a tile, rows: its rows, whose two sums registers hold. dot:
    (builder, sums, pairs, pairs) -> sums. like: what a kernel gets to know its engine by the type.
    """

    name: str
    like: Any
    needs: tuple[str, ...]
    lanes: int
    rows: int
    dot: Callable[..., Any]


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _vnni(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    kind = sums.type
    return builder.call(_declared(builder, "llvm.x86.avx512.vpdpwssd.512", kind, [kind] * 3), [sums, a, b])


def _multiply_add(name: str) -> Callable[..., Any]:
    def dot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), 2 * sums.type.count)
        function = _declared(builder, name, sums.type, [halves] * 2)
        return builder.add(sums, builder.call(function, [builder.bitcast(x, halves) for x in (a, b)]))

    return dot


ENGINES = (
    Engine("avx512_vnni", np.uint8(0), ("avx512f", "avx512vnni"), 16, 12, _vnni),
    Engine("avx512", np.uint16(0), ("avx512f", "avx512bw"), 16, 12, _multiply_add("llvm.x86.avx512.pmaddw.d.512")),
    Engine("avx2", np.uint32(0), ("avx2",), 8, 6, _multiply_add("llvm.x86.avx2.pmadd.wd")),
)


def engines() -> list[Engine]:
    """The engines of this machine, the fastest first."""
    features = processor_features()
    return [engine for engine in ENGINES if features.issuperset(engine.needs)]


def _tile(engine: Engine) -> Any:
    """The intrinsic that adds the products of a tile to int64 sums z [rows, lanes].

    Its arguments: a, pairs of int16 [pairs, rows]; b, pairs of digits [pairs, 2, lanes], h before l; the number of
    pairs, from 1 to TERMS / 2; z.
    """
    rows, lanes = engine.rows, engine.lanes
    words, longs = ir.VectorType(_WORD, lanes), ir.VectorType(_LONG, lanes)

    def add_products(typingctx: Any, a: Any, b: Any, pairs: Any, z: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, pairs, z = arguments

            def splat(scalar: Any, kind: Any) -> Any:
                undefined = ir.Constant(kind, ir.Undefined)
                first = builder.insert_element(undefined, scalar, _WORD(0))
                return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_WORD, lanes), None))

            def place(base: Any, index: int, kind: Any) -> Any:
                return builder.bitcast(builder.gep(base, [_LONG(index)]), kind.as_pointer())

            def load(place: Any, align: int) -> Any:
                vector = builder.load(place)
                vector.align = align
                return vector

            before = builder.block
            loop, done = builder.append_basic_block("pairs"), builder.append_basic_block("sums")
            builder.branch(loop)
            builder.position_at_end(loop)
            k, at_a, at_b = builder.phi(_LONG), builder.phi(a.type), builder.phi(b.type)
            sums = [[builder.phi(words) for _ in range(2)] for _ in range(rows)]
            digits = [load(place(at_b, j * lanes, words), 4) for j in range(2)]
            after = []
            for i in range(rows):
                left = splat(builder.load(builder.gep(at_a, [_LONG(i)])), words)
                after.append([engine.dot(builder, sums[i][j], left, digits[j]) for j in range(2)])
            advanced = (
                builder.add(k, _LONG(1)),
                builder.gep(at_a, [_LONG(rows)]),
                builder.gep(at_b, [_LONG(2 * lanes)]),
            )
            for phi, first, later in zip((k, at_a, at_b), (_LONG(0), a, b), advanced, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(later, loop)
            for i in range(rows):
                for j in range(2):
                    sums[i][j].add_incoming(ir.Constant(words, None), before)
                    sums[i][j].add_incoming(after[i][j], loop)
            builder.cbranch(builder.icmp_signed("<", advanced[0], pairs), loop, done)
            builder.position_at_end(done)
            shift = ir.Constant(longs, [_LONG(8)] * lanes)
            for i in range(rows):
                high, low = (builder.sext(s, longs) for s in after[i])
                total = builder.add(builder.shl(high, shift), low)
                to = place(z, i * lanes, longs)
                builder.store(builder.add(load(to, 8), total), to).align = 8
            return context.get_dummy_value()

        return types.void(a, b, pairs, z), generate

    return intrinsic(add_products)


_BY_TYPE = {numba.typeof(engine.like): engine for engine in ENGINES}
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


def add_products(engine: Any, a: Any, b: Any, pairs: Any, z: Any) -> Any:
    """Add the products of a tile to its sums: see `_tile`."""
    raise NotImplementedError


@overload(add_products, jit_options=INLINED)
def _add_products(engine, a, b, pairs, z):
    tile = _TILES[engine]
    return lambda engine, a, b, pairs, z: tile(a, b, pairs, z)
