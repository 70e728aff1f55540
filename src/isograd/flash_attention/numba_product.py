# mypy: ignore-errors
"""Matrix products of small tiles on the CPU, as chains of fused multiply-adds in the order of the contracted index.

    c[i, j] = Σ_k a[i, k] b[k, j], a chain from zero for every TERMS values of k, the chains added in their order

Registers hold a few rows by a few vectors of c. How many depends on the processor; the chains of an element do not,
so that every processor returns the same bits, with vectors of any length. Short chains halve the error of long ones.
NumPy's BLAS reaches half the speed on tiles of this size and promises no order.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from isograd.numerics.numba_memory import advance
from isograd.runtime.numba_compile import INLINED, processor_features, subroutine

VECTOR_BYTES = 64  # a vector of the code; processors with shorter ones take several for it
PADDING = 8  # rows that a product may touch beyond the last one: all tiles and their operands have room for them
TERMS = 64  # of a chain
STORE, ADD, SCALE_ADD = range(3)  # c = product; c + product; c * factor of the row + product


def _registers() -> tuple[int, int]:
    """Rows and vectors of c that registers hold beside a row of b."""
    return (8, 2) if "avx512f" in processor_features() else (4, 1)


def lanes(like: Any) -> Any:
    """Elements of a vector."""
    raise NotImplementedError


@overload(lanes, jit_options=INLINED)
def _lanes(like):
    count = VECTOR_BYTES * 8 // like.bitwidth
    return lambda like: np.int64(count)


class _Emitter:
    """Vector instructions for one element type."""

    def __init__(self, builder: Any, element: Any, bits: int) -> None:
        self.builder = builder
        self.count = VECTOR_BYTES * 8 // bits
        self.bytes = bits // 8
        self.type = ir.VectorType(element, self.count)
        name = f"llvm.fma.v{self.count}f{bits}"
        kind = ir.FunctionType(self.type, [self.type] * 3)
        self.fused = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.fused, [a, b, c])

    def splat(self, scalar: Any) -> Any:
        undefined, word = ir.Constant(self.type, ir.Undefined), ir.IntType(32)
        first = self.builder.insert_element(undefined, scalar, word(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(word, self.count), None))

    def place(self, base: Any, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(base, [index]), self.type.as_pointer())

    def load(self, place: Any) -> Any:
        vector = self.builder.load(place)
        vector.align = self.bytes
        return vector

    def store(self, vector: Any, place: Any) -> None:
        self.builder.store(vector, place).align = self.bytes


def tile(rows: int, vectors: int, mode: int) -> Any:
    """A product of `rows` rows of a with `vectors` vectors of columns of b, kept in registers.

    Its arguments: a, the steps of its rows and columns; b, the steps of its vectors and rows; the length n > 0 of the
    contracted axis; c and the step of its rows; one factor a row.
    """

    def product(
        typingctx: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_vector: Any, b_step: Any, n: Any, c: Any,
        c_row: Any, factors: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, a_step, b, b_vector, b_step, n, c, c_row, factors = arguments
            element = context.get_value_type(signature.args[0].dtype)
            emit = _Emitter(builder, element, signature.args[0].dtype.bitwidth)
            word = ir.IntType(64)
            zero = ir.Constant(emit.type, None)
            a_rows = [builder.mul(word(i), a_row) for i in range(rows)]
            b_vectors = [builder.mul(word(j), b_vector) for j in range(vectors)]
            before = builder.block
            loop, done = builder.append_basic_block("terms"), builder.append_basic_block("sum")
            builder.branch(loop)
            builder.position_at_end(loop)
            k, at_a, at_b = builder.phi(word), builder.phi(a.type), builder.phi(b.type)
            sums = [[builder.phi(emit.type) for _ in range(vectors)] for _ in range(rows)]
            right = [emit.load(emit.place(at_b, j)) for j in b_vectors]
            after = []
            for i in range(rows):
                left = emit.splat(builder.load(builder.gep(at_a, [a_rows[i]])))
                after.append([emit.fma(left, right[j], sums[i][j]) for j in range(vectors)])
            advanced = (builder.add(k, word(1)), builder.gep(at_a, [a_step]), builder.gep(at_b, [b_step]))
            for phi, first, later in zip((k, at_a, at_b), (word(0), a, b), advanced, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(later, loop)
            for i in range(rows):
                for j in range(vectors):
                    sums[i][j].add_incoming(zero, before)
                    sums[i][j].add_incoming(after[i][j], loop)
            builder.cbranch(builder.icmp_signed("<", advanced[0], n), loop, done)
            builder.position_at_end(done)
            for i in range(rows):
                row = builder.mul(word(i), c_row)
                factor = emit.splat(builder.load(builder.gep(factors, [word(i)]))) if mode == SCALE_ADD else None
                for j in range(vectors):
                    place = emit.place(c, builder.add(row, word(j * emit.count)))
                    total = after[i][j]
                    if mode == ADD:
                        total = builder.fadd(emit.load(place), total)
                    elif mode == SCALE_ADD:
                        total = emit.fma(emit.load(place), factor, total)
                    emit.store(total, place)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, b_vector, b_step, n, c, c_row, factors), generate

    return intrinsic(product)


def _product(mode: int, shape: tuple[int, int]) -> Any:
    rows, vectors = shape
    several, single = tile(rows, vectors, mode), tile(rows, 1, mode)
    add_several, add_single = tile(rows, vectors, ADD), tile(rows, 1, ADD)

    @subroutine
    def multiply(a, a_row, a_step, count, b, b_vector, b_step, columns, n, c, c_row, factors):
        width = lanes(factors[0])
        first = min(n, TERMS)
        for j in range(0, columns, width * vectors):
            whole = columns - j > width * (vectors - 1)
            at_b = advance(b, j // width * b_vector)
            for i in range(0, count, rows):
                at_a, at_c = advance(a, i * a_row), advance(c, i * c_row + j)
                if whole:
                    several(at_a, a_row, a_step, at_b, b_vector, b_step, first, at_c, c_row, advance(factors, i))
                else:
                    single(at_a, a_row, a_step, at_b, b_vector, b_step, first, at_c, c_row, advance(factors, i))
                for k in range(TERMS, n, TERMS):
                    next_a, next_b, terms = advance(at_a, k * a_step), advance(at_b, k * b_step), min(n - k, TERMS)
                    if whole:
                        add_several(next_a, a_row, a_step, next_b, b_vector, b_step, terms, at_c, c_row, factors)
                    else:
                        add_single(next_a, a_row, a_step, next_b, b_vector, b_step, terms, at_c, c_row, factors)

    return multiply


def products(shape: tuple[int, int]) -> tuple[Any, ...]:
    """(multiply, multiply_add, multiply_scaled) for a shape of the registers.

    Arguments: a, the steps of its rows and columns, count of its rows; b, the steps of its vectors of columns and of
    its rows, count of its columns; the length n > 0 of the contracted axis; c and the step of its rows; factors of the
    rows, which only multiply_scaled uses. Counts are rounded up: rows to PADDING at most, columns to a vector.
    """
    return tuple([_product(mode, shape) for mode in (STORE, ADD, SCALE_ADD)])


multiply, multiply_add, multiply_scaled = products(_registers())
