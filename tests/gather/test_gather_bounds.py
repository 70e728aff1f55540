"""Every result within its plan's error bound, on inputs chosen to hurt; and the bound is one that can be broken."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.core import arrays
from isograd.gather import bounds
from isograd.gather import reference as ref

DTYPES = ["float16", "bfloat16", "float32", "float64"]
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60
MILLION = 1_000_000

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")


def need_wide(dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")


def ratio(shape, indices, values, result, x=None):
    """The largest error of a sum of rows, as a fraction of the bound."""
    bound = bounds.error_bound("index_sum", values.dtype.name)(indices=indices, values=values, shape=shape, x=x)
    expected = ref.oracle_index_sum(shape, indices, values, x)
    # Nothing is promised about a result that overflows, and about every other one something.
    finite = np.abs(expected) <= float(ml_dtypes.finfo(values.dtype).max)
    assert np.isfinite(bound[finite & (np.abs(expected) < 1e4)]).all()
    return worst_error(result, expected, bound)


def total(shape, indices, values, x=None):
    return ig.segment_sum(values, indices, shape[0]) if x is None else ig.scatter_sum(x, indices, values, 0)


def hurtful(dtype):
    """Name → shape, indices, values, x."""
    rng = np.random.default_rng(50)
    info = ml_dtypes.finfo(dtype)
    tiny, big = float(info.smallest_subnormal), float(info.max)
    indices = rng.integers(0, 20, 600)
    normal = rng.standard_normal((600, 9))
    alternating = np.where(np.arange(600) % 2, 1.0, -1.0)[:, None]
    with np.errstate(over="ignore"):
        overflow = normal * big
    cases = {
        "normal": normal,
        "offset": normal + 50,
        "cancellation": alternating * (100 + 1e-3 * normal),
        "complete cancellation": np.broadcast_to(alternating * 3, (600, 9)),
        "equal": np.full((600, 9), 0.1),
        "spread": normal * np.exp2(rng.uniform(-30, 10, (600, 9))),
        "wide spread": normal * np.exp2(rng.uniform(-140, 15, (600, 9))),
        "subnormal": tiny * rng.integers(-9, 9, (600, 9)),
        "large": normal * (big * 2.0**-12),
        "overflow": overflow,
    }
    for name, values in cases.items():
        with np.errstate(all="ignore"):
            x = np.asarray(rng.standard_normal((20, 9))).astype(dtype)
            yield name, (20, 9), indices, np.asarray(values).astype(dtype), x


@each_dtype
def test_hurtful_inputs_stay_within_the_bound(dtype):
    need_wide(dtype)
    worst = {}
    for name, shape, indices, values, x in hurtful(arrays.numpy_dtype(dtype)):
        for key, base in ((name, None), (f"{name}, onto x", x)):
            worst[key] = ratio(shape, indices, values, total(shape, indices, values, base), base)
            assert worst[key] <= 1, key
    # A bound that nothing comes near would prove nothing.
    assert max(worst.values()) > 0.5, worst


@each_dtype
def test_a_result_one_place_off_breaks_the_bound(dtype):
    need_wide(dtype)
    _, shape, indices, values, _ = next(hurtful(arrays.numpy_dtype(dtype)))
    out = total(shape, indices, values)
    for places in (1, -1):
        wrong = (out.view(f"i{out.itemsize}") + places).view(out.dtype)
        assert ratio(shape, indices, values, wrong) > 1


@each_dtype
def test_a_lost_source_breaks_the_bound(dtype):
    need_wide(dtype)
    _, shape, indices, values, _ = next(hurtful(arrays.numpy_dtype(dtype)))
    for lost in (0, 300, 599):
        kept = np.arange(600) != lost
        assert ratio(shape, indices, values, total(shape, indices[kept], values[kept])) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_terms_that_cancel_to_a_millionth(dtype):
    need_wide(dtype)
    of = arrays.numpy_dtype(dtype)
    rng = np.random.default_rng(52)
    for rest in ((), (2,)):
        half = rng.standard_normal((MILLION // 2 - 1, *rest)).astype(of)
        half = np.where(np.abs(half) > 4, of.type(4), half)
        left = np.array([[2.0**-19], [2.0**-20]]).reshape(2, *(1,) * len(rest)) * np.ones((1, *rest))
        values = np.concatenate([half, -half, left.astype(of)])[rng.permutation(MILLION)]
        shape, indices = (5, *rest), np.full(MILLION, 3)
        out = total(shape, indices, values)
        expected = float(np.float64(2.0**-19) + 2.0**-20)
        assert 5e-7 < expected / float(np.abs(values).max()) < 2e-6
        bound = bounds.error_bound("index_sum", dtype)(indices=indices, values=values, shape=shape)[3]
        assert np.all(np.abs(out[3].astype(np.longdouble) - expected) <= bound)
        assert np.all(out[np.arange(5) != 3] == 0)
        again = rng.permutation(MILLION)
        assert total(shape, indices[again], values[again]).tobytes() == out.tobytes()


def test_a_running_float_sum_fails_where_a_million_terms_cancel():
    rng = np.random.default_rng(53)
    half = rng.standard_normal(MILLION // 2 - 1).astype(np.float32)
    values = np.concatenate([half, -half, np.float32([2.0**-19, 2.0**-20])])[rng.permutation(MILLION)]
    indices = np.full(MILLION, 1)
    assert ratio((2,), indices, values, total((2,), indices, values)) <= 1
    wrong = np.array([0, np.cumsum(values, dtype=np.float32)[-1]], np.float32)
    assert ratio((2,), indices, values, wrong) > 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rest", [(), (10,)], ids=["line", "rows"])
def test_sources_1e_12_of_anothers_keep_their_own_quantum(rest, dtype):
    need_wide(dtype)
    rng = np.random.default_rng(54)
    of = arrays.numpy_dtype(dtype)
    for num, scale in ((2, 1e-12), (5000, 1e-12), (2, 1e-30)):
        indices = np.arange(2000) % 2
        factor = np.where(indices == 1, scale, 1.0).reshape(-1, *(1,) * len(rest))
        values = (factor * rng.standard_normal((2000, *rest))).astype(of)
        shape = (num, *rest)
        out = total(shape, indices, values)
        assert ratio(shape, indices, values, out) <= 1
        alone = total(shape, indices[1::2], values[1::2])
        assert alone[1].tobytes() == out[1].tobytes()
        # One quantum for all destinations would not do.
        q = np.abs(values).max().astype(np.float64) * (2.0**-44 if dtype == "float32" else 2.0**-88)
        shared = np.asarray((np.rint(values[1::2].astype(np.longdouble) / q).sum(axis=0) * q).astype(of))
        wrong = out.copy()
        wrong[1] = shared
        if dtype == "float32" or scale < 1e-20:
            assert ratio(shape, indices, values, wrong) > 1


@pytest.mark.thorough
def test_float64_against_fractions():
    # An oracle without any float, and one that also exists where longdouble is binary64.
    rng = np.random.default_rng(55)
    indices = rng.integers(0, 4, 300)
    values = rng.standard_normal(300) * np.exp2(rng.integers(-40, 40, 300))
    out = total((4,), indices, values)
    for d in range(4):
        terms = values[indices == d]
        exact = sum((Fraction(v) for v in terms.tolist()), Fraction(0))
        quantum = Fraction(2) ** (math.frexp(np.abs(terms).max())[1] - 1 - 88)
        error = abs(Fraction(float(out[d])) - exact)
        assert error <= len(terms) * quantum / 2 + Fraction(float(np.spacing(abs(float(exact))))) / 2


@each_dtype
def test_copies_have_no_error(dtype):
    x = np.random.default_rng(56).standard_normal((6, 5)).astype(arrays.numpy_dtype(dtype))
    indices = np.array([[1, 1, 2], [0, 3, 4]])
    take = bounds.error_bound("take_along_axis", dtype)(x=x, indices=indices, axis=1)
    assert take.shape == indices.shape
    select = bounds.error_bound("index_select", dtype)(weight=x, indices=indices)
    assert select.shape == (2, 3, 5)
    assert not take.any()
    assert not select.any()


def test_the_bound_of_a_plan_can_be_called():
    plan = ig.ScatterSumPlan.select(ig.ScatterSumDescriptor((3, 4), (3, 2), "bfloat16"))
    bound = plan.precision_guarantee.error_bound
    x, values = np.ones((3, 4), ml_dtypes.bfloat16), np.ones((3, 2), ml_dtypes.bfloat16)
    limit = bound(indices=np.zeros((3, 2), np.int64), values=values, x=x, axis=-1)
    # 1 + 2 = 3: half an ulp of float32 for the sum and for the addition, half an ulp of bfloat16 for the result.
    assert limit[0, 0] == pytest.approx(2.0**-7, rel=0.01)
    assert "c·q/2" in bound.formula
