"""The contract's arithmetic in Metal, operation by operation, with subnormals kept and flushed."""

import re
from typing import Any

import numpy as np
import pytest
from emulator import FLUSHES, library, needs_compiler
from problems import BFLOAT16

from isograd.devices import metal
from isograd.numerics import constants as c
from isograd.numerics import reference as ref

pytestmark = needs_compiler
HEADER = metal.text_of("isograd/numerics/metal_sums.h")
_NEEDS_FLUSH = pytest.mark.skipif(not FLUSHES, reason="only x86-64 can be told to flush subnormal numbers")
_FLUSH = pytest.mark.parametrize("flush", [False, pytest.param(True, marks=_NEEDS_FLUSH)])

_SCALAR = """
kernel void {name}(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                   device const float* c [[buffer(2)]], device float* y [[buffer(3)]],
                   device float* z [[buffer(4)]], uint i [[thread_position_in_grid]]) {{
  using namespace isograd;
  Pair pair; pair.high = pair.low = 0.0f;
  {body}
  store(y, i, pair.high);
  store(z, i, pair.low);
}}
"""
_SUMS = """
kernel void sums(device const long* high [[buffer(0)]], device const long* low [[buffer(1)]],
                 device const long* exponent [[buffer(2)]], device float* y [[buffer(3)]],
                 device float* z [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  isograd::Wide w; w.high = high[i]; w.low = low[i];
  const isograd::Pair p = isograd::number_pair(w, int(exponent[i]));
  y[i] = p.high;
  z[i] = p.low;
}
kernel void integers(device const float* x [[buffer(0)]], device const long* shift [[buffer(1)]],
                     device long* k [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  k[i] = isograd::scaled_integer(x[i], int(shift[i]));
}
kernel void from_half(device const half* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) { y[i] = isograd::widen(x[i]); }
kernel void from_bfloat(device const bfloat* x [[buffer(0)]], device float* y [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) { y[i] = isograd::widen(x[i]); }
kernel void to_half(device const float* x [[buffer(0)]], device half* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { isograd::store(y, i, x[i]); }
kernel void to_bfloat(device const float* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) { isograd::store(y, i, x[i]); }
"""
_BODIES = {
    "times": "pair.high = times(a[i], b[i]);",
    "plus": "pair.high = plus(a[i], b[i]);",
    "fused": "pair.high = fused(a[i], b[i], c[i]);",
    "quotient": "pair.high = quotient(a[i], b[i]);",
    "exponential": "pair.high = exponential(a[i]);",
    "exponential_short": "pair.high = exponential_short(a[i]);",
    "exponential_short_any": "pair.high = exponential_short_any(a[i]);",
    "logarithm": "pair.high = logarithm(a[i]);",
    "log1p_pair": "pair = log1p_pair(a[i], b[i]);",
}
SOURCE = HEADER + "".join(_SCALAR.format(name=f"run_{n}", body=b) for n, b in _BODIES.items()) + _SUMS
COUNT = 20_000


def _numbers(seed: int, spread: str = "bits") -> np.ndarray[Any, Any]:
    """Any bits, or numbers whose products and sums are around the smallest normal one."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, COUNT, dtype=np.uint32)
    if spread == "small":
        exponent = rng.integers(0, 70, COUNT, dtype=np.uint32)
        bits = (bits & 0x807FFFFF) | (exponent << 23)
    elif spread == "near one":
        exponent = rng.integers(100, 150, COUNT, dtype=np.uint32)
        bits = (bits & 0x807FFFFF) | (exponent << 23)
    values = bits.view(np.float32).copy()
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, 1, 3.4e38], np.float32)
    values[:100] = np.repeat(special, 10) if seed % 2 else np.tile(special, 10)
    return values


def _results(name: str, flush: bool, *inputs: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    given = [*inputs, *[np.zeros_like(inputs[0])] * (3 - len(inputs))]
    y, z = np.empty_like(inputs[0]), np.empty_like(inputs[0])
    arguments = [np.array(a) for a in given]
    library(SOURCE).run(f"run_{name}", *arguments, y, z, threads=y.size, group_size=32, flush=flush)
    return y, z


def _assert_bits(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], *inputs: np.ndarray[Any, Any]) -> None:
    expected = ref.narrow(np.asarray(expected, np.float32), np.float32)
    wrong = np.flatnonzero(got.view(np.uint32) != expected.view(np.uint32))
    shown = [(got[i], expected[i], *[a[i] for a in inputs]) for i in wrong[:5]]
    assert wrong.size == 0, f"{wrong.size} of {got.size}: {shown}"


_SPREADS = pytest.mark.parametrize("spreads", [("bits",) * 3, ("small",) * 3, ("near one", "small", "small")])


@_FLUSH
@_SPREADS
def test_elementary_operations_are_those_of_ieee_754(flush: bool, spreads: tuple[str, ...]) -> None:
    a, b, d = (_numbers(seed, spread) for seed, spread in enumerate(spreads))
    with np.errstate(all="ignore"):
        _assert_bits(_results("times", flush, a, b)[0], a * b, a, b)
        _assert_bits(_results("plus", flush, a, b)[0], a + b, a, b)
        _assert_bits(_results("quotient", flush, a, b)[0], a / b, a, b)
        _assert_bits(_results("fused", flush, a, b, d)[0], ref.fma(a, b, d), a, b, d)


@_FLUSH
def test_cancelling_fma(flush: bool) -> None:
    a, b = _numbers(4, "small"), _numbers(5, "near one")
    with np.errstate(all="ignore"):
        c_near = -(a * b)
        _assert_bits(_results("fused", flush, a, b, c_near)[0], ref.fma(a, b, c_near), a, b, c_near)


@_FLUSH
def test_exponentials_and_logarithm(flush: bool) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([_numbers(7), rng.uniform(-110, 95, COUNT).astype(np.float32)])
    _assert_bits(_results("exponential", flush, x)[0], ref.exp(x), x)
    _assert_bits(_results("exponential_short_any", flush, x)[0], ref.exp_short_any(x), x)
    _assert_bits(_results("logarithm", flush, x)[0], ref.log(x), x)
    below = -np.abs(np.where(np.isnan(x), np.float32(1), x))
    _assert_bits(_results("exponential_short", flush, below)[0], ref.exp_short(below), below)


@_FLUSH
def test_logarithm_of_a_ratio(flush: bool) -> None:
    rng = np.random.default_rng(8)
    t = np.ldexp(rng.uniform(1, 2, COUNT), rng.integers(-44, 18, COUNT)).astype(np.float32)
    t[:3] = 0
    low = (t * rng.uniform(-(2.0**-25), 2.0**-25, COUNT)).astype(np.float32)
    high, rest = _results("log1p_pair", flush, t, low)
    expected = ref.log1p_pair(t, low)
    _assert_bits(high, expected[0], t, low)
    _assert_bits(rest, expected[1], t, low)


def test_conversions_of_every_16_bit_number_and_to_them() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = np.concatenate([_numbers(9), _numbers(10, "near one")])
    for name, dtype in (("half", np.dtype(np.float16)), ("bfloat", BFLOAT16)):
        x, y = bits.view(dtype).copy(), np.empty(bits.size, np.float32)
        library(SOURCE).run(f"from_{name}", x, y, threads=bits.size, group_size=256, flush=FLUSHES)
        with np.errstate(invalid="ignore"):
            assert np.array_equal(np.isnan(y), np.isnan(x.astype(np.float32)))
        finite = ~np.isnan(y)
        assert np.array_equal(y[finite].view(np.uint32), x.astype(np.float32)[finite].view(np.uint32))
        # And back, from every number that both know, between them, and beyond.
        with np.errstate(all="ignore"):
            middle = (y[:-1].astype(np.float64) + y[1:].astype(np.float64)).astype(np.float32) / np.float32(2)
        v = np.concatenate([y, middle, np.nextafter(middle, np.float32(np.inf)), wide])
        narrow = np.empty(v.size, dtype)
        library(SOURCE).run(f"to_{name}", v, narrow, threads=v.size, group_size=256, flush=FLUSHES)
        assert narrow.tobytes() == ref.narrow(v, dtype).tobytes()


def test_integer_terms() -> None:
    x, shift = _numbers(11, "small"), np.empty(COUNT, np.int64)
    x[~np.isfinite(x)] = 1
    exponent = np.frexp(x)[1] - 1
    shift[:] = np.random.default_rng(12).integers(-60, 61, COUNT) - exponent
    k = np.empty(COUNT, np.int64)
    library(SOURCE).run("integers", x, shift, k, threads=COUNT, group_size=32, flush=FLUSHES)
    expected = [int(np.rint(np.ldexp(np.float64(v), int(s)))) for v, s in zip(x, shift, strict=True)]
    assert k.tolist() == expected


def test_integers_become_numbers_with_one_rounding() -> None:
    rng = np.random.default_rng(13)
    scale = np.exp2(rng.uniform(-40, 62, COUNT))
    high = (rng.uniform(-1, 1, COUNT) * scale).astype(np.int64)
    low = rng.integers(-(1 << 40), 1 << 40, COUNT)
    low[: COUNT // 2] = 0
    exponent = rng.integers(-230, 40, COUNT)
    y, z = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
    library(SOURCE).run("sums", high, low, exponent, y, z, threads=COUNT, group_size=32, flush=FLUSHES)
    form = ref.FORMATS[np.dtype(np.float32)]
    with np.errstate(all="ignore"):
        totals = [(int(h) << 32) + int(v) for h, v in zip(high, low, strict=True)]
        expected = [ref.round_integer(t, int(e), form) for t, e in zip(totals, exponent, strict=True)]
        rests = [t - int(ref.round_integer(t, 0, form)) for t in totals]
        lows = [ref.round_integer(r, int(e), form) for r, e in zip(rests, exponent, strict=True)]
    _assert_bits(y, np.array(expected))
    fits = np.array([abs(t) < 1 << 86 for t in totals])
    _assert_bits(z[fits], np.array(lows)[fits])


@pytest.mark.parametrize("name", ["times", "plus", "fused"])
@_NEEDS_FLUSH
def test_the_hardware_alone_would_flush(name: str) -> None:
    """What the functions guard against does happen here."""
    body = {"times": "a[i] * b[i]", "plus": "a[i] + b[i]", "fused": "fma(a[i], b[i], c[i])"}[name]
    source = HEADER + _SCALAR.format(name="run_plain", body=f"pair.high = {body};")
    a, b, d = (_numbers(seed, "small") for seed in range(3))
    y, z = np.empty_like(a), np.empty_like(a)
    library(source).run("run_plain", a, b, d, y, z, threads=a.size, group_size=32, flush=True)
    assert np.any(y != _results(name, True, a, b, d)[0])


def test_constants_are_those_of_the_contract() -> None:
    found = dict(re.findall(r"constant constexpr \w+ (\w+) = ([-\w.+]+);", HEADER))
    numbers = {name: np.float32(value.rstrip("f")) for name, value in found.items() if value.endswith("f")}
    expected = {
        "MAGIC": c.MAGIC_32,
        "LOG2E": c.LOG2E_32,
        "LN2": c.LN2_32,
        "LN2_REST": c.LN2_REST_32,
        "LN2_HI": c.LN2_HI_32,
        "LN2_LO": c.LN2_LO_32,
        **{f"EXP_{i}": v for i, v in enumerate(c.EXP_POLY_32)},
        **{f"EXP2_{i}": v for i, v in enumerate(c.EXP2_POLY_SHORT)},
        **{f"LOG_{i}": v for i, v in enumerate(c.LOG_POLY_32)},
        "LOG1P_LOW": c.LOG1P_NEAR_32[0],
        "LOG1P_HIGH": c.LOG1P_NEAR_32[1],
        "EXP_FLOOR": c.EXP_FLOOR_32,
        "EXP_CEIL": c.EXP_CEIL_32,
        "EXP_DIRECT": c.EXP_DIRECT_32,
        "SHORT_LEAST": c.SHORT_MIN_EXPONENT,
        "SHORT_LOW": c.SHORT_NORMAL[0],
        "SHORT_HIGH": c.SHORT_NORMAL[1],
    }
    assert numbers == {name: np.float32(value) for name, value in expected.items()}
    whole = {"EXP_SCALE": c.EXP_SCALE_32, "SHORT_BITS": c.SHORT_QUANTUM_BITS, "QUANTUM_BITS": c.QUANTUM_BITS}
    whole |= {"SHORT_ROW": c.SHORT_ROW, "SQRT_HALF_BITS": c.SQRT_HALF_BITS_32}
    assert {name: int(found[name], 0) for name in whole} == whole
