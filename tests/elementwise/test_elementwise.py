"""exp, log, sigmoid and silu: kernels against the reference bit for bit, values against wider floats."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isograd as ig
from isograd.elementwise import api, reference
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.runtime import fenv, parallel

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
UNARY = {"exp": api.exp, "log": api.log, "sigmoid": api.sigmoid, "silu": ig.silu}
BACKWARD = {"sigmoid_backward": api.sigmoid_backward, "silu_backward": ig.silu_backward}


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def boundaries(dtype):
    """Every kind of value, NaN payloads and the neighbourhood of every threshold included."""
    info = ml_dtypes.finfo(dtype)
    middle = [
        0.0,
        0.5,
        1.0,
        88.72,
        89.5,
        103.97,
        104.0,
        105.0,
        106.0,
        128.0,
        709.78,
        710.5,
        744.4,
        745.13,
        746.0,
        1024.0,
    ]
    values = [*middle, float(info.tiny), float(info.smallest_subnormal), float(info.max), np.inf, np.nan]
    with np.errstate(over="ignore"):
        x = np.array([*values, *(-v for v in values)]).astype(dtype)
    with np.errstate(all="ignore"):
        near = [np.nextafter(x, np.array(end, dtype)) for end in (np.inf, -np.inf)]
    integer = f"u{x.itemsize}"
    payloads = np.array(
        [np.array(np.nan, dtype).view(integer) | 1, np.array(-np.nan, dtype).view(integer) | 3], integer
    )
    return np.concatenate([x, *near, payloads.view(dtype)])


def sample(dtype, seed=0):
    rng = np.random.default_rng(seed)
    spread = np.ldexp(rng.standard_normal(3000), rng.integers(-30, 30, 3000))
    with np.errstate(over="ignore"):
        x = np.concatenate([rng.uniform(-110, 110, 3000), rng.uniform(-760, 760, 1000), spread]).astype(dtype)
    return np.concatenate([boundaries(dtype), x])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_bits_of_the_reference(name, dtype):
    x = sample(dtype)
    assert bits(UNARY[name](x)) == bits(getattr(reference, name)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_bits_of_the_reference(name, dtype):
    x, special = sample(dtype), boundaries(dtype)
    dy = np.random.default_rng(1).standard_normal(x.size).astype(dtype)
    assert bits(BACKWARD[name](dy, x)) == bits(getattr(reference, name)(dy, x))
    dy, x = (np.ascontiguousarray(v) for v in np.broadcast_arrays(special[:, None], special))
    assert bits(BACKWARD[name](dy, x)) == bits(getattr(reference, name)(dy, x))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", UNARY)
def test_every_sixteen_bit_value(name, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    y = UNARY[name](x)
    wide = UNARY[name](x.astype(np.float32))
    with np.errstate(over="ignore"):
        expected = wide.astype(dtype)
    number = ~np.isnan(wide)
    assert y[number].tobytes() == expected[number].tobytes()
    assert set(y[~number].view(np.uint16)) <= {int(np.array(np.nan, dtype).view(np.uint16))}


# --- errors against a wider float -----------------------------------------------------------------------------------
def wider(dtype):
    return np.float64 if dtype == np.float32 else np.longdouble


def unit(dtype):
    return (2.0**-24, 2.0**-149) if dtype == np.float32 else (2.0**-53, np.longdouble(2) ** -1074)


def dense(dtype):
    rng = np.random.default_rng(2)
    reach = 112 if dtype == np.float32 else 760
    spread = np.ldexp(rng.standard_normal(20000), rng.integers(-40, 20, 20000))
    return np.concatenate([rng.uniform(-reach, reach, 40000), rng.uniform(-4, 4, 40000), spread]).astype(dtype)


def needs_wide(dtype):
    if dtype == np.float64 and np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("no float wider than binary64 here")


def silu_error(x):
    """The error of silu in units of its bound."""
    u, tiny = unit(x.dtype)
    v = x.astype(wider(x.dtype))
    with np.errstate(over="ignore"):
        exact = v / (1 + np.exp(-v))
    error = np.abs(ig.silu(x).astype(v.dtype) - exact)
    return np.max(error / (5.2 * u * np.abs(exact) + (1 + np.abs(v)) * tiny))


def silu_backward_error(dy, x):
    u, tiny = unit(x.dtype)
    v, g = x.astype(wider(x.dtype)), dy.astype(wider(x.dtype))
    with np.errstate(over="ignore"):
        s, rest = 1 / (1 + np.exp(-v)), 1 / (1 + np.exp(v))
    error = np.abs(ig.silu_backward(dy, x).astype(v.dtype) - g * s * (1 + v * rest))
    bound = 10 * u * np.abs(g) * s * (1 + np.abs(v) * rest) + (1 + np.abs(v)) * (1 + np.abs(g)) * tiny
    return np.max(error / bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_silu_within_its_bounds(dtype):
    needs_wide(dtype)
    x = dense(dtype)
    assert 0.3 < silu_error(x) <= 1
    rng = np.random.default_rng(3)
    dy = np.ldexp(rng.standard_normal(x.size), rng.integers(-100, 100, x.size)).astype(dtype)
    assert 0.3 < silu_backward_error(dy, x) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_within_its_bounds(dtype):
    needs_wide(dtype)
    u, tiny = unit(dtype)
    x = dense(dtype)
    v = x.astype(wider(dtype))
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-v))
    y = api.sigmoid(x)
    assert 0.3 < np.max(np.abs(y.astype(v.dtype) - exact) / (4.2 * u * exact + tiny)) <= 1
    rng = np.random.default_rng(3)
    dy = np.ldexp(rng.standard_normal(x.size), rng.integers(-100, 100, x.size)).astype(dtype)
    g, s = dy.astype(v.dtype), y.astype(v.dtype)
    exact = g * s * (1 - s)
    error = np.abs(api.sigmoid_backward(dy, y).astype(v.dtype) - exact)
    assert 0.3 < np.max(error / (3.1 * u * np.abs(exact) + tiny)) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["exp", "log"])
def test_exp_and_log_within_their_bounds(name, dtype):
    needs_wide(dtype)
    x = dense(dtype) if name == "exp" else np.abs(dense(dtype))
    with np.errstate(over="ignore"):
        exact = getattr(np, name)(x.astype(wider(dtype)))
        ulp = np.spacing(np.abs(exact).astype(dtype))
    y = UNARY[name](x).astype(exact.dtype)
    inside = np.isfinite(ulp) & np.isfinite(y)
    assert np.max(np.abs(y[inside] - exact[inside]) / ulp[inside]) <= 1.05


def test_special_values():
    for dtype in DTYPES:
        x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype)
        one = np.ones(5, dtype)
        assert bits(api.exp(x)) == bits(np.array([np.inf, 0, np.nan, 1, 1], dtype))
        assert bits(api.log(x)) == bits(np.array([np.inf, np.nan, np.nan, -np.inf, -np.inf], dtype))
        assert bits(api.sigmoid(x)) == bits(np.array([1, 0, np.nan, 0.5, 0.5], dtype))
        assert bits(ig.silu(x)) == bits(np.array([np.inf, -0.0, np.nan, 0.0, -0.0], dtype))
        assert bits(ig.silu_backward(one, x)) == bits(np.array([1, -0.0, np.nan, 0.5, 0.5], dtype))


# --- shapes, layouts, threads ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    step=st.sampled_from([1, 2, -1, -3]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shapes_and_strides(dtype, shape, step, turned, seed):
    rng = np.random.default_rng(seed)
    sizes, part = [n * abs(step) for n in shape], (..., *(slice(None, None, step) for _ in shape))
    x, dy = (np.asarray(rng.standard_normal(sizes), dtype)[part] for _ in range(2))
    if turned:
        x, dy = x.T, dy.T
    before = x.copy()
    assert bits(ig.silu(x)) == bits(reference.silu(x))
    assert bits(ig.silu_backward(dy, x)) == bits(reference.silu_backward(dy, x))
    assert bits(x) == bits(before)


def test_threads_and_chunks_leave_no_trace(monkeypatch):
    x = np.random.default_rng(4).standard_normal(5000).astype(np.float32)
    y = api.exp(x)
    before = parallel.get_num_threads()
    try:
        for threads, grain in ((1, 7), (2, 100), (3, 4999)):
            parallel.set_num_threads(threads)
            monkeypatch.setattr(parallel, "grain", lambda count, work, chosen=grain: max(1, chosen // work))
            assert bits(api.exp(x)) == bits(y)
    finally:
        parallel.set_num_threads(before)
    assert bits(np.concatenate([api.exp(part) for part in np.array_split(x, 13)])) == bits(y)


@pytest.mark.skipif(not fenv._X86, reason="sets MXCSR")
@pytest.mark.parametrize("control", [0x9FC0, 0x5F80], ids=["flush to zero", "round up"])
def test_the_callers_floating_point_environment(control):
    x = np.concatenate([sample(np.float32), np.full(100, 1e-40, np.float32)])
    expected = [UNARY[name](x) for name in UNARY]
    previous = fenv.enter()
    try:
        fenv.leave(control)
        changed = [UNARY[name](x) for name in UNARY]
    finally:
        fenv.leave(previous)
    assert [bits(y) for y in changed] == [bits(y) for y in expected]


def test_errors():
    x = np.ones(3, np.float32)
    for name in ("exp", "log", "sigmoid"):
        with pytest.raises(InvalidProblemError, match=rf"{name}: x is a list; expected a NumPy array"):
            getattr(api, name)([1.0])
        with pytest.raises(UnsupportedError, match=rf"{name}: x has dtype int32; accepted: float16"):
            getattr(api, name)(np.ones(3, np.int32))
        with pytest.raises(UnsupportedError, match=r">f4"):
            getattr(api, name)(np.ones(3, ">f4"))
    for dy in (np.ones(4, np.float32), np.ones(3)):
        with pytest.raises(
            InvalidProblemError, match=r"sigmoid_backward: dy is .* expected dtype and shape of y, float32"
        ):
            api.sigmoid_backward(dy, x)
