# mypy: ignore-errors
"""Vectors as a type of Numba's: the functions of the contract take one where they take a number, lane by lane.

A loop that LLVM turns into vectors itself adds up the lanes after every few hundred elements and checks its memory
before it starts; one that is written with vectors keeps its sums in registers. The operators of Python serve; a number
beside a vector stands for as many lanes, in their type. What chooses between two values is `select`.

The lanes of a bfloat16 vector that was widened are in another order than the elements, and meet only what was widened
likewise; narrowing puts them back.
"""

import functools
import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, overload, register_model

from isograd.runtime.numba_compile import INLINED, device_function, processor_features


class Vector(types.Type):
    """`lanes` numbers of a type."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")

    def of(self, dtype: Any) -> Any:
        return Vector(dtype, self.lanes)


@register_model(Vector)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), kind.lanes))


def element(kind: Any) -> Any:
    """The type of a number, or of the lanes of a vector."""
    return kind.dtype if isinstance(kind, Vector) else kind


def _spread(context: Any, builder: Any, value: Any, given: Any, wanted: Any) -> Any:
    """A value as a vector of the wanted type; a number goes into every lane."""
    if isinstance(given, Vector):
        return value
    single = context.cast(builder, value, given, wanted.dtype)
    undefined = ir.Constant(context.get_value_type(wanted), ir.Undefined)
    first = builder.insert_element(undefined, single, ir.IntType(32)(0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), wanted.lanes), [0] * wanted.lanes)
    return builder.shuffle_vector(first, undefined, places)


# --- operators -------------------------------------------------------------------------------------------------------
_ARITHMETIC = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}
_BITS = {operator.and_: "and_", operator.or_: "or_", operator.xor: "xor", operator.lshift: "shl"}
_COMPARED = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def _emit(builder: Any, function: Any, dtype: Any, a: Any, b: Any) -> Any:
    real = isinstance(dtype, types.Float)
    if function in _COMPARED:
        sign = _COMPARED[function]
        if not real:
            return (
                builder.icmp_signed(sign, a, b) if getattr(dtype, "signed", True) else builder.icmp_unsigned(sign, a, b)
            )
        return builder.fcmp_unordered(sign, a, b) if sign == "!=" else builder.fcmp_ordered(sign, a, b)
    if function in _ARITHMETIC:
        return getattr(builder, ("f" if real else "") + _ARITHMETIC[function])(a, b)
    if function is operator.rshift:
        return builder.ashr(a, b) if dtype.signed else builder.lshr(a, b)
    return getattr(builder, _BITS[function])(a, b)


def _register(function: Any) -> None:
    @infer_global(function)
    class Template(AbstractTemplate):
        def generic(self, given: Any, keywords: Any) -> Any:
            vectors = [kind for kind in given if isinstance(kind, Vector)]
            if len(given) != 2 or not vectors:
                return None
            kind = vectors[0]
            return signature(kind.of(types.boolean) if function in _COMPARED else kind, *given)

    def implementation(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        kind = next(t for t in sig.args if isinstance(t, Vector))
        a, b = (_spread(context, builder, v, t, kind) for v, t in zip(arguments, sig.args, strict=True))
        return _emit(builder, function, kind.dtype, a, b)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(function, *pair)(implementation)


for _function in (*_ARITHMETIC, *_BITS, operator.rshift, *_COMPARED):
    _register(_function)


@infer_global(operator.neg)
class _Negative(AbstractTemplate):
    def generic(self, given: Any, keywords: Any) -> Any:
        return signature(given[0], *given) if isinstance(given[0], Vector) else None


@lower_builtin(operator.neg, Vector)
def _negative(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return builder.fneg(arguments[0]) if isinstance(sig.args[0].dtype, types.Float) else builder.neg(arguments[0])


# --- functions -------------------------------------------------------------------------------------------------------
def _widest(*kinds: Any) -> Any:
    """The type of a result: a vector if one of the operands is."""
    return next((kind for kind in kinds if isinstance(kind, Vector)), kinds[0])


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, d: Any) -> Any:
    """A * b + d, rounded once."""
    kind = _widest(a, b, d)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        if not isinstance(kind, Vector):
            return builder.fma(*arguments)
        values = [_spread(context, builder, v, t, kind) for v, t in zip(arguments, sig.args, strict=True)]
        llvm = context.get_value_type(kind)
        of = ir.FunctionType(llvm, (llvm, llvm, llvm))
        name = f"llvm.fma.v{kind.lanes}f{kind.dtype.bitwidth}"
        return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, of, name), values)

    return kind(a, b, d), generate


@intrinsic
def _select_lanes(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    kind = _widest(a, b)
    kind = kind if isinstance(kind, Vector) else condition.of(kind)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        x, y = (_spread(context, builder, arguments[i], sig.args[i], kind) for i in (1, 2))
        return builder.select(arguments[0], x, y)

    return kind(condition, a, b), generate


def select(condition: Any, a: Any, b: Any) -> Any:
    """A where the condition holds, b elsewhere."""
    raise NotImplementedError


@overload(select, jit_options=INLINED)
def _select(condition, a, b):
    if isinstance(condition, Vector):
        return lambda condition, a, b: _select_lanes(condition, a, b)
    return lambda condition, a, b: a if condition else b


@intrinsic
def convert(typingctx: Any, x: Any, like: Any) -> Any:
    """X in the type of `like`; an integer modulo its width."""
    target = x.of(element(like)) if isinstance(x, Vector) else like

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        value, given = arguments[0], element(x)
        if given == target or element(target) == given:
            return value
        if not isinstance(x, Vector):
            return context.cast(builder, value, x, target)
        llvm = context.get_value_type(target)
        if given.bitwidth > target.dtype.bitwidth:
            return builder.trunc(value, llvm)
        if given.bitwidth == target.dtype.bitwidth:
            return value
        return builder.sext(value, llvm) if given.signed else builder.zext(value, llvm)

    return target(x, like), generate


@device_function
def int32(x):
    """An integer, or the lanes of a vector, modulo 2**32."""
    return convert(x, np.int32(0))


@device_function
def int64(x):
    """An integer, or the lanes of a vector, modulo 2**64."""
    return convert(x, np.int64(0))


@intrinsic
def spread(typingctx: Any, x: Any, base: Any) -> Any:
    """A vector of the lanes that those at a pointer have, all x."""
    kind = Vector(x, lanes_of(base.dtype))
    return kind(x, base), lambda context, builder, sig, arguments: _spread(context, builder, arguments[0], x, kind)


def _halves(builder: Any, value: Any) -> tuple[Any, Any]:
    """The first and the second half of the lanes."""
    count = value.type.count // 2
    places = ir.VectorType(ir.IntType(32), count)
    return tuple(
        builder.shuffle_vector(value, value, ir.Constant(places, list(range(i * count, (i + 1) * count))))
        for i in range(2)
    )


def _high_words(lanes: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0xFFFF0000] * lanes)


@intrinsic
def as_high_words(typingctx: Any, x: Any) -> Any:
    """Words of 16 bits, each above 16 zeros: those of even places, then those of odd ones."""
    kind, lanes = x.of(types.int32), x.lanes // 2

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pairs = builder.bitcast(arguments[0], ir.VectorType(ir.IntType(32), lanes))
        even = builder.shl(pairs, ir.Constant(pairs.type, [16] * lanes))
        odd = builder.and_(pairs, _high_words(lanes))
        return builder.shuffle_vector(even, odd, ir.Constant(context.get_value_type(kind), list(range(2 * lanes))))

    return kind(x), generate


@intrinsic
def from_high_words(typingctx: Any, x: Any) -> Any:
    """The upper words of what `as_high_words` returns, in their places again."""
    kind, lanes = x.of(types.uint16), x.lanes // 2

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        even, odd = _halves(builder, arguments[0])
        even = builder.lshr(even, ir.Constant(even.type, [16] * lanes))
        return builder.bitcast(builder.or_(even, builder.and_(odd, _high_words(lanes))), context.get_value_type(kind))

    return kind(x), generate


@intrinsic
def in_order(typingctx: Any, x: Any, like: Any) -> Any:
    """The lanes of a vector that was made of elements of the type of `like` in the order of those."""
    half = x.lanes // 2

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        if like != types.uint16:
            return arguments[0]
        places = [i // 2 + half * (i % 2) for i in range(x.lanes)]
        order = ir.Constant(ir.VectorType(ir.IntType(32), x.lanes), places)
        return builder.shuffle_vector(arguments[0], arguments[0], order)

    return x(x, like), generate


def _folded(name: str) -> Any:
    def fold(typingctx: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            llvm, single = context.get_value_type(x), context.get_value_type(x.dtype)
            full = f"llvm.vector.reduce.{name}.v{x.lanes}i{x.dtype.bitwidth}"
            of = ir.FunctionType(single, (llvm,))
            return builder.call(builder.module.globals.get(full) or ir.Function(builder.module, of, full), arguments)

        return x.dtype(x), generate

    return intrinsic(fold)


# The sum and the largest of the lanes of a vector of integers.
lanes_sum, lanes_maximum = _folded("add"), _folded("smax")


# --- memory ----------------------------------------------------------------------------------------------------------
LANES = 32  # at most
LINE = 64  # bytes of memory that caches move at a time


@functools.cache
def _bytes() -> int:
    """The bytes that vectors of what is computed in have.

    Two registers of AVX-512, two to four of others. Instructions on one do not wait for those on the other: a processor
    holds too few that wait to find such in the next turn of a long loop.
    """
    return 128 if "avx512f" in processor_features() else 64


def lanes_of(dtype: Any) -> int:
    """The lanes of vectors of a storage type."""
    return _bytes() // (8 if dtype == types.float64 else 4)


@intrinsic
def load_vector(typingctx: Any, base: Any, index: Any) -> Any:
    """The elements from an index on."""
    kind = Vector(base.dtype, lanes_of(base.dtype))

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), context.get_value_type(kind).as_pointer())
        return builder.load(place, align=base.dtype.bitwidth // 8)

    return kind(base, types.int64), generate


@intrinsic
def load_kept(typingctx: Any, base: Any, index: Any, like: Any) -> Any:
    """A vector of the work type that was stored for elements of the type of `like`."""
    kind = Vector(base.dtype, lanes_of(like))

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), context.get_value_type(kind).as_pointer())
        return builder.load(place, align=base.dtype.bitwidth // 8)

    return kind(base, types.int64, like), generate


@intrinsic
def store_vector(typingctx: Any, base: Any, index: Any, value: Any) -> Any:
    """Write the elements from an index on."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), context.get_value_type(value).as_pointer())
        builder.store(arguments[2], place, align=base.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(base, types.int64, value), generate


@intrinsic
def stream_line(typingctx: Any, base: Any, index: Any, block: Any, start: Any) -> Any:
    """Copy a line, whose address is a multiple of its size, from a block to memory, past the caches."""

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        size = base.dtype.bitwidth // 8
        line = ir.VectorType(context.get_value_type(base.dtype), LINE // size).as_pointer()
        to, source = (builder.bitcast(builder.gep(arguments[i], [arguments[i + 1]]), line) for i in (0, 2))
        written = builder.store(builder.load(source, align=size), to, align=LINE)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(base, types.int64, block, types.int64), generate


@intrinsic
def vector_lanes(typingctx: Any, base: Any) -> Any:
    """The lanes of the vectors at a pointer."""
    lanes = lanes_of(base.dtype)
    return types.int64(base), lambda context, builder, sig, arguments: ir.IntType(64)(lanes)


def prefetcher(write: bool, level: int, whole_vector: bool = False) -> Any:
    """An intrinsic that asks for the line of an element, or the lines of a vector, into a level of the caches."""

    def prefetch(typingctx: Any, base: Any, index: Any) -> Any:
        size = lanes_of(base.dtype) * base.dtype.bitwidth // 8 if whole_vector else 1

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), (byte, word, word, word))
            function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
            for offset in range(0, size, LINE):
                line = builder.gep(place, [word(offset)])
                builder.call(function, (line, word(int(write)), word(4 - level), word(1)))
            return context.get_dummy_value()

        return types.void(base, types.int64), generate

    return intrinsic(prefetch)


prefetch_vector = prefetcher(write=False, level=1, whole_vector=True)
