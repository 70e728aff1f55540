"""Run under TRITON_INTERPRET=1: compare the kernels of products with the definition in Triton's interpreter.

    python interpreted_products.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
from interpreter_patches import report

import isograd as ig
from isograd.cli import check, suites
from isograd.core import registry
from isograd.numerics import int16
from isograd.numerics.matmul import DEFINITION, matmul
from isograd.numerics.reference import narrow, widen
from isograd.products import cuda, grouped, tiles, triton_grouped
from isograd.products.tiles import Tiles

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
WORDS = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}
# Small ones, by TMA, by pointers, and in pieces.
SMALL = Tiles(32, 32, 64, 2, True, 4, 2)
BY_POINTER = SMALL._replace(tma=False, depth=128)
IN_PIECES = SMALL._replace(pieces=2)
EVERY = "--exhaustive" in sys.argv
Case = tuple[str, bool]


def to_torch(x: Any) -> torch.Tensor:
    words = torch.from_numpy(np.array(x, order="C").view(WORDS[x.dtype.name]))
    return words.view(getattr(torch, x.dtype.name))


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def product(a: torch.Tensor, b: torch.Tensor, balance: Any = None, config: Tiles | None = SMALL) -> torch.Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    c = torch.empty((*batch, a.shape[-2], b.shape[-1]), dtype=a.dtype)
    given = None if balance is None else torch.from_numpy(balance.astype(np.int32))
    cuda.product(a, b, c, given, config)
    return c


def laid_out(x: Any, layout: str) -> torch.Tensor:
    """The same numbers, transposed in memory or with gaps."""
    t = to_torch(x)
    if layout == "T":
        return t.mT.contiguous().mT
    if layout == "gaps":
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 3), dtype=t.dtype)
        wide[..., 1 : 1 + 2 * t.shape[-1] : 2] = t
        return wide[..., 1 : 1 + 2 * t.shape[-1] : 2]
    return t


def random(rng: Any, shape: tuple[int, ...], dtype: str, spread: int = 6) -> Any:
    return np.ldexp(rng.standard_normal(shape), rng.integers(-spread, spread, shape)).astype(NUMPY[dtype])


def layouts() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    sizes = [(1, 1, 1), (17, 130, 33), (40, 17, 1), (1, 130, 40), (33, 257, 65)]
    for i, (m, k, n) in enumerate(sizes):
        for j, (p, q) in enumerate([("N", "N"), ("N", "T"), ("T", "N"), ("T", "T"), ("gaps", "gaps"), ("T", "gaps")]):
            if not EVERY and (i + j) % 3:
                continue
            dtype = list(NUMPY)[i % 3]
            a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
            expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
            for config in (SMALL, BY_POINTER) if i > 2 else (SMALL,):
                yield (
                    f"{m, k, n} {p}{q} {dtype} {config}",
                    bits(product(laid_out(a, p), laid_out(b, q), None, config)) == expected,
                )


def pieces() -> Iterator[Case]:
    """Long contracted axes, cut: the exact sums of pieces are joined in 64 bits."""
    rng = np.random.default_rng(1)
    for i, (m, k, n) in enumerate([(1, 1000, 17), (33, 385, 40), (5, 129, 1)]):
        dtype = list(NUMPY)[i % 3]
        a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
        expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
        for count in (2, 3, 8) if EVERY else (2, 8):
            for tile in (SMALL, BY_POINTER) if EVERY else (SMALL if count == 2 else BY_POINTER,):
                found = product(to_torch(a), to_torch(b), None, tile._replace(pieces=count))
                yield f"{m, k, n} {dtype} {count} {tile}", bits(found) == expected


def extremes() -> Iterator[Case]:
    """The digits and sums that are largest in magnitude, at the longest axis of one accumulator and beyond."""
    for k, pieces in ((65536, 1), (65536, 2), (2 * 65536, 2)):
        for x in (32639, -32639, 32512 - 128) if EVERY else (-32639,):
            a, b = np.full((1, k), x, np.float32), np.full((k, 2), x, np.float32)
            b[:, 1] = -x
            expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
            tile = Tiles(16, 16, 8192, 1, True, 4, 1, pieces)
            yield f"{k} times {x}", bits(product(to_torch(a), laid_out(b, "T"), None, tile)) == expected


def scales() -> Iterator[Case]:
    """Results at the ends of the range, subnormal ones and zeros, every exponent of an element."""
    rng = np.random.default_rng(2)
    for dtype, low, high in (("float16", -24, 15), ("bfloat16", -133, 127), ("float32", -149, 127)):
        for middle in (low, (low + high) // 2, high, None):
            at = np.int64(0) if middle is None else middle
            spread = (high - low) if middle is None else 3
            powers = np.clip(at + rng.integers(-spread, spread + 1, (40, 20)), low, high)
            with np.errstate(over="ignore"):
                a = np.ldexp(rng.uniform(-1.99, 1.99, (40, 20)), powers).astype(NUMPY[dtype])
                a[np.isinf(a)] = 1
            a[3], a[5, 2:] = 0, 0
            opposite = np.clip(rng.integers(-1, 2, (20, 33)) - (at if middle is not None else 0), low, high)
            for b_powers in (opposite, np.clip(at + opposite * 0, low, high)):
                b = np.ldexp(rng.uniform(-1.9, 1.9, (20, 33)), b_powers).astype(NUMPY[dtype])
                expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
                for tile in (SMALL, IN_PIECES) if EVERY else (SMALL if middle == low else IN_PIECES,):
                    found = product(to_torch(a), to_torch(b), None, tile)
                    yield f"{dtype} {middle} {tile.pieces}", bits(found) == expected


def special() -> Iterator[Case]:
    """Operands with NaN, infinities and zeros."""
    rng = np.random.default_rng(3)
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    for dtype in NUMPY:
        for m, k, n, share in ((40, 130, 70, 0.002), (40, 130, 70, 0.05), (3, 7, 5, 0.4), (1, 1, 1, 1.0)):
            a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
            for x in (a, b):
                x[rng.random(x.shape) < share] = rng.choice(values)
            for x in (a, b):
                some = rng.random(x.shape) < share
                x[some] = rng.choice(values, some.sum())
            expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
            for p, q, tile in (("N", "N", SMALL), ("T", "T", IN_PIECES))[: None if EVERY else 1]:
                found = product(laid_out(a, p), laid_out(b, q), None, tile)
                yield f"{dtype} {m, k, n} {p}{q}", bits(found) == expected


def balances() -> Iterator[Case]:
    """Balances of weights and over tokens, and any others."""
    rng = np.random.default_rng(4)
    for i, (m, k, n) in enumerate([(17, 130, 33), (5, 300, 70), (1, 1, 1), (9, 2, 20), (3, 1030, 3)]):
        for dtype in NUMPY if EVERY else list(NUMPY)[i % 3 : i % 3 + 1]:
            a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
            a = (a * np.exp2(rng.integers(-6, 7, k)).astype(NUMPY[dtype])).astype(NUMPY[dtype])
            b[rng.random(k) < 0.2] = 0
            a[:, rng.random(k) < 0.1] = 0
            if i == 1:
                a[0, 5], b[7, 0] = np.nan, np.inf
            p, q = ("N", "T") if i % 2 else ("T", "N")
            left, right = laid_out(a, p), laid_out(b, q)
            weight, tokens = int16.balance_of(b), int16.balance_between(a, b)
            yield f"weight {m, k, n} {dtype}", np.array_equal(cuda.balance_of(right).numpy(), weight)
            yield f"tokens {m, k, n} {dtype}", np.array_equal(cuda.balance_between(left, right).numpy(), tokens)
            for balance in (weight, tokens, rng.integers(-1024, 1025, k)):
                with np.errstate(all="ignore"):
                    expected = bits(to_torch(matmul(a, b, "int16", balance, DEFINITION)))
                yield f"{m, k, n} {dtype} {balance[:4]}", bits(product(left, right, balance)) == expected
    b = random(rng, (3, 0), "float32")
    yield "no columns", np.array_equal(cuda.balance_of(to_torch(b)).numpy(), int16.balance_of(b))


def batches() -> Iterator[Case]:
    """Stacks of matrices whose batches broadcast, joined to one matrix where they can be."""
    rng = np.random.default_rng(5)
    shapes = [
        ((3, 17, 20), (20, 9)), ((3, 17, 20), (3, 20, 9)), ((17, 20), (2, 20, 9)), ((2, 1, 5, 20), (3, 20, 9)),
        ((2, 3, 5, 20), (2, 1, 20, 9)), ((2, 3, 5, 20), (20, 9)), ((1, 1, 5, 20), (1, 20, 9)), ((0, 5, 20), (20, 9)),
        ((2, 5, 0), (0, 9)), ((2, 0, 4), (4, 9)),
    ]  # fmt: skip
    for i, (left, right) in enumerate(shapes):
        for layout in ("N", "T", "gaps") if EVERY else (("N", "T", "gaps")[i // 2 % 3],):
            dtype = list(NUMPY)[i % 3]
            a, b = random(rng, left, dtype), random(rng, right, dtype)
            if i == 3:
                a.reshape(-1)[30] = np.inf
            with np.errstate(all="ignore"):
                expected = bits(to_torch(matmul(a, b, "int16", engine=DEFINITION)))
            for tile in (SMALL, IN_PIECES) if EVERY else ((SMALL, IN_PIECES)[i % 2],):
                found = product(laid_out(a, layout), laid_out(b, layout), None, tile)
                yield f"{left} {right} {layout} {dtype} {tile.pieces}", bits(found) == expected
    a, b = random(rng, (1, 4, 20), "float32"), random(rng, (20, 9), "float32")
    expected = bits(to_torch(matmul(np.broadcast_to(a, (3, 4, 20)), b, "int16", engine=DEFINITION)))
    yield "expanded", bits(product(to_torch(a).expand(3, 4, 20), to_torch(b))) == expected


def rows() -> Iterator[Case]:
    """The bias of a linear layer, NaN included."""
    rng = np.random.default_rng(6)
    for dtype in (*NUMPY, "float64"):
        kind = NUMPY.get(dtype, np.float64)
        x, bias = rng.standard_normal((33, 47)).astype(kind), rng.standard_normal(47).astype(kind)
        x[3, 4], bias[5], x[7, 8], bias[8] = np.nan, np.inf, -np.inf, np.inf
        with np.errstate(all="ignore"):
            expected = narrow(widen(x) + widen(bias), x.dtype)
        out = torch.empty((33, 47), dtype=getattr(torch, dtype))
        cuda.add_to_rows(to_torch(x), to_torch(bias), out)
        yield dtype, bits(out) == bits(to_torch(expected))


def published() -> Iterator[Case]:
    """The cases of `isograd verify`, by the kernel that it runs, into results of another layout too."""
    digests = check.published()["results"]["matmul"]
    kernel = next(e.kernel for e in registry.kernels() if e[:3] == ("matmul", "cuda", "float32"))
    for dtype in NUMPY:
        for i, case in enumerate(suites.cases("matmul", dtype)):
            a, b = (laid_out(x, "N" if x.flags.c_contiguous else "T") for x in case.inputs.values())
            descriptor = suites.SUITES["matmul"].descriptor(case, dtype).validated()
            c = torch.full(descriptor.c_shape, 7.0, dtype=a.dtype)
            c = c.mT.contiguous().mT if i % 2 else c
            kernel.compute(descriptor, {"a": a, "b": b, "c": c}, None)
            found = np.frombuffer(bits(c), NUMPY[dtype]).reshape(c.shape)
            yield f"{dtype} {case.name}", check.digest(found) == digests[dtype][case.name]


def by_experts(x: Any, w: Any, ends: list[int], balanced: bool) -> bytes:
    """Each expert's product [rows, K] times [K, N], one after the other."""
    found = []
    for e, (start, stop) in enumerate(itertools.pairwise(ends)):
        balance = int16.balance_of(w[e]) if balanced else None
        found.append(matmul(x[start:stop], w[e], "int16", balance, DEFINITION))
    return bits(to_torch(np.concatenate(found)))


def by_experts_along_rows(x: Any, y: Any, ends: list[int], balanced: bool) -> bytes:
    """Each expert's product [M, rows] times [rows, N], one after the other."""
    found = []
    for start, stop in itertools.pairwise(ends):
        a, b = x[start:stop].T, y[start:stop]
        balance = int16.balance_between(a, b) if balanced else None
        found.append(matmul(a, b, "int16", balance, DEFINITION))
    return bits(to_torch(np.stack(found)))


GROUPS = (
    (9, 20, 17, [0, 4, 4, 9], False), (300, 130, 40, [0, 0, 130, 131, 300, 300], True), (5, 200, 3, [0, 5], False),
    (70, 33, 90, [0, 1, 33, 65, 70], True), (260, 5, 65, [0, 128, 256, 260, 260], False), (1, 1, 1, [0, 0, 1], True),
)  # fmt: skip


def experts() -> Iterator[Case]:
    """Products of several experts, some without rows, of any layout, with what is not finite."""
    rng = np.random.default_rng(7)
    for i, (rows, k, n, ends, wild) in enumerate(GROUPS):
        for j, (p, q) in enumerate([("N", "N"), ("T", "T"), ("gaps", "gaps")]):
            if not EVERY and (i + j) % 3:
                continue
            dtype = list(NUMPY)[i % 3]
            x, w = random(rng, (rows, k), dtype), random(rng, (len(ends) - 1, k, n), dtype)
            y = random(rng, (rows, n), dtype)
            w[:, : k // 3] = (w[:, : k // 3] / 5000).astype(w.dtype)
            x[0], y[-1] = 0, 0
            if wild:
                x[rows // 2, 0], w[-1, 0, 0], y[rows // 3, n // 2] = np.inf, np.nan, -np.inf
            offsets = grouped.checked_offsets("grouped_linear", torch.tensor(ends), rows)
            left, right, other = laid_out(x, p), laid_out(w, q), laid_out(y, q)
            for balanced in (True, False):
                for tile in (SMALL, BY_POINTER) if EVERY else (SMALL if i % 2 else BY_POINTER,):
                    with np.errstate(all="ignore"):
                        expected = by_experts(x, w, ends, balanced)
                        along = by_experts_along_rows(x, y, ends, balanced)
                    c = torch.full((rows, n), 7, dtype=left.dtype)
                    grouped.product_of_rows(left, right, offsets, c, balanced, tile)
                    yield f"{rows, k, n} {p}{q} {dtype} {balanced} {tile.tma}", bits(c) == expected
                    c = torch.full((len(ends) - 1, k, n), 7, dtype=left.dtype)
                    grouped.product_along_rows(left, other, offsets, c, balanced, tile)
                    yield f"along {rows, k, n} {p}{q} {dtype} {balanced} {tile.tma}", bits(c) == along
    # Sums that are longer than an accumulator's.
    x, w, y = (
        random(rng, (700, 600), "bfloat16"),
        random(rng, (2, 600, 9), "bfloat16"),
        random(rng, (700, 5), "bfloat16"),
    )
    ends = [0, 100, 700]
    offsets = grouped.checked_offsets("grouped_linear", torch.tensor(ends), 700)
    c, along = torch.empty(700, 9, dtype=torch.bfloat16), torch.empty(2, 600, 5, dtype=torch.bfloat16)
    with mock.patch.object(tiles, "LONGEST", 1), mock.patch.object(triton_grouped, "_LONGEST", tl.constexpr(256)):
        grouped.product_of_rows(to_torch(x), to_torch(w), offsets, c)
        grouped.product_along_rows(to_torch(x), to_torch(y), offsets, along)
    yield "long rows", bits(c) == by_experts(x, w, ends, True)
    yield "many rows", bits(along) == by_experts_along_rows(x, y, ends, True)


def offsets_that_do_not_fit() -> Iterator[Case]:
    """They are reported, rows are NaN, and nothing outside is read or written."""
    x, w = torch.ones(40, 3), torch.ones(3, 3, 5)
    for ends, position, said in (
        ([0, 7, 5, 40], 2, 5), ([1, 7, 8, 40], 0, 1), ([0, 7, 8, 39], 3, 39), ([0, 7, 41, 40], 2, 41),
        ([-3, 7, 8, 40], 0, -3), ([0, 7, 2**40, 40], 2, 2**40),
    ):  # fmt: skip
        offsets = grouped.checked_offsets("grouped_linear", torch.tensor(ends), 40)
        c, along = torch.zeros(40, 5), torch.zeros(3, 3, 5)
        grouped.product_of_rows(x, w, offsets, c)
        grouped.product_along_rows(x, c, offsets, along)
        try:
            ig.check()
            message = "nothing"
        except ig.IndexOutOfRangeError as error:
            message = str(error)
        right = f"grouped_linear: offsets has {said} at flat position {position}" in message
        yield f"{ends} {message}", right and bool(c.isnan().all()) and not along.any()


SUITES = {
    "layouts": layouts, "pieces": pieces, "extremes": extremes, "scales": scales, "special": special,
    "balances": balances, "batches": batches, "rows": rows, "published": published,
    "experts": experts, "offsets": offsets_that_do_not_fit,
}  # fmt: skip

if __name__ == "__main__":
    report(SUITES)
