"""Every result within its plan's error bound, on inputs chosen to hurt; and the bound is one that can be broken."""

import decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd import ops
from isograd.core import arrays
from isograd.numerics import reference as numerics
from isograd.numerics.bounds import ulp
from isograd.ops.softmax import reference as ref

DTYPES = ["float16", "bfloat16", "float32", "float64"]
OPERATIONS = ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"]
LONG = 131_072
TAIL = 1 << 20
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def plan_of(operation, shape, dtype, axis=-1):
    op = ops.OPERATIONS[operation]
    return op.plan_type.select(op.descriptor_type(shape, dtype, axis))


def exact(operation, inputs, axis=-1):
    return getattr(ref, f"oracle_{operation}")(*inputs.values(), axis)


def ratios(operation, inputs, result, axis=-1):
    """|result - exact| / bound for every element. 0 where both are the same infinity or NaN, inf where only one is."""
    first = next(iter(inputs.values()))
    bound = plan_of(operation, first.shape, first.dtype.name, axis).precision_guarantee.error_bound
    expected = exact(operation, inputs, axis)
    with np.errstate(all="ignore"):
        limit = np.asarray(bound(**inputs, axis=axis))
        error = np.abs(result.astype(np.longdouble) - expected)
        ratio = np.where(error == 0, 0, error / limit)
        same = (np.isnan(result) & np.isnan(expected)) | (result.astype(np.longdouble) == expected)
        ratio = np.where(same, 0, ratio)
        # Nothing is promised about a result that overflows, and about every other one something.
        assert (np.isfinite(limit) | ~(np.abs(expected) <= float(ml_dtypes.finfo(first.dtype).max))).all()
        ratio = np.where(np.isinf(limit), 0, ratio)
    return np.where(np.isnan(ratio), np.inf, ratio)


def run(operation, inputs, axis=-1):
    return getattr(ig, operation)(*inputs.values(), axis)


def ulps(result, expected, dtype):
    return np.abs(result.astype(np.longdouble) - expected) / ulp(expected, dtype)


# --- inputs that hurt -----------------------------------------------------------------------------------------------
def logits(dtype):
    """Name → rows of logits."""
    rng = np.random.default_rng(30)
    info = ml_dtypes.finfo(dtype)
    big, tiny, least = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    n = 400
    dominant = np.full((1, TAIL + 1), -20.0)
    dominant[0, 12345] = 0
    few = np.full((1, TAIL + 1), -45.0)
    few[0, 7] = 0
    cases = {
        "normal": 3 * rng.standard_normal((40, n)),
        "offset 1e4": 1e4 + 4 * rng.standard_normal((8, n)),
        "offset -1e7": -1e7 + 4 * rng.standard_normal((8, n)),
        "either side of 256": np.array([[255.9], [256.1], [-255.9], [-256.1]])
        - np.abs(30 * rng.standard_normal((4, n))),
        "either side of 2048": np.array([[2047.9], [2048.1], [-2047.9]]) - np.abs(30 * rng.standard_normal((3, n))),
        "long tail": -np.linspace(0, 110, n)[None] + rng.uniform(-0.1, 0.1, (8, n)),
        "longer tail": -np.linspace(0, 760, n)[None] + rng.uniform(-1, 1, (4, n)),
        "overflowing difference": np.array([[big, -big, 0.5 * big, -0.5 * big, 0, 1]]),
        "subnormal": least * rng.integers(-9, 9, (4, n)),
        "around the smallest normal": tiny * rng.standard_normal((4, n)),
        "one element": rng.standard_normal((9, 1)),
        "two elements": 20 * rng.standard_normal((300, 2)),
        "equal": np.repeat([[0.1], [-3.3], [77.7]], LONG, axis=1),
        "one dominant": dominant,
        "one dominant, tail below the quantum": few,
        "-inf with one finite": np.where(np.arange(n) == 17, 3.0, -np.inf)[None],
        "half -inf": np.where(rng.random((4, n)) < 0.5, -np.inf, rng.standard_normal((4, n))),
        "-inf alone": np.full((2, 5), -np.inf),
    }
    return {name: x.astype(dtype) for name, x in cases.items()}


def gradients(operation, dtype):
    """Name → (dy, y) for a backward operation."""
    rng = np.random.default_rng(31)
    info = ml_dtypes.finfo(dtype)
    tiny, big = float(info.smallest_subnormal), float(info.max)
    forward = getattr(ig, operation.removesuffix("_backward"))
    n = 400
    x = (3 * rng.standard_normal((40, n))).astype(dtype)
    y, g = forward(x), rng.standard_normal((40, n))
    halves = np.where(np.arange(n) % 2, 1.0, -1.0)
    flat = forward(np.zeros((2, LONG), dtype))
    peak = np.full((1, TAIL + 1), -18.0)
    peak[0, 99] = 0
    return {
        "normal": (g, y),
        "offset 1e4": (g + 1e4, y),
        # Σ y·dy is next to nothing beside its terms, or nothing at all.
        "cancellation": ((halves * (1 + 1e-3 * rng.standard_normal((8, n))) * 1e3), forward(np.zeros((8, n), dtype))),
        "complete cancellation": (np.tile(halves * 4096, (2, 1)), forward(np.zeros((2, n), dtype))),
        "constant gradient": (np.full((40, n), 0.7), y),
        "equal": (np.stack([np.ones(LONG), rng.standard_normal(LONG)]), flat),
        "one dominant": (rng.standard_normal((1, TAIL + 1)), forward(peak.astype(dtype))),
        "all weights": (np.exp2(rng.uniform(-40, 10, (40, n))) * rng.choice([-1, 1], (40, n)), y),
        "subnormal": (tiny * rng.integers(-9, 9, (40, n)), y),
        "large": (rng.standard_normal((40, n)) * (big * 2.0**-16), y),
        "one element": (rng.standard_normal((9, 1)), forward(np.zeros((9, 1), dtype))),
        # exp(y) is subnormal or nothing, and one large gradient makes it count.
        "vanishing probabilities": (
            np.where(np.arange(n) == 0, big * 2.0**-12, 0.0) * np.ones((4, 1)),
            (-np.linspace(0, 760 if dtype == np.float64 else 104, n) * np.ones((4, 1))).astype(dtype)
            if forward is ig.log_softmax
            else forward((-np.linspace(0, 760, n) * np.ones((4, 1))).astype(dtype)),
        ),
        "masked": (g, forward(np.where(rng.random((40, n)) < 0.5, np.array(-np.inf, dtype), x))),
    }


def hurtful(operation, name):
    dtype = arrays.numpy_dtype(name)
    with np.errstate(all="ignore"):
        if not operation.endswith("_backward"):
            return {case: {"x": x} for case, x in logits(dtype).items()}
        return {
            case: {"dy": np.asarray(dy).astype(dtype), "y": np.asarray(y)}
            for case, (dy, y) in gradients(operation, dtype).items()
        }


@each_dtype
@pytest.mark.parametrize("operation", OPERATIONS)
def test_hurtful_inputs_stay_within_the_bound(operation, dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    worst = {}
    for case, inputs in hurtful(operation, dtype).items():
        ratio = ratios(operation, inputs, run(operation, inputs))
        worst[case] = float(ratio.max())
        assert worst[case] <= 1, case
    # A bound that nothing comes near would prove nothing.
    assert max(worst.values()) > 0.05, worst


@each_dtype
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_result_one_place_off_breaks_the_bound(operation, dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    inputs = hurtful(operation, dtype)["normal"]
    y = run(operation, inputs)
    # float32 and float64 promise 2 ulp forward; the backwards promise more room, and so a larger slip is planted.
    places = {"softmax": 3, "log_softmax": 3}.get(operation, 60) if dtype in ("float32", "float64") else 1
    wrong = (np.ascontiguousarray(y).view(f"i{y.itemsize}") + places).view(y.dtype)
    assert np.mean(ratios(operation, inputs, wrong) > 1) > (0.05 if operation.endswith("backward") else 0.5)


@each_dtype
@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
def test_a_lost_element_breaks_the_bound(operation, dtype):
    # A row whose last element a loop forgot: what an off-by-one in a kernel would give.
    inputs = hurtful(operation, dtype)["normal"]
    x = inputs["x"].copy()
    x[:, -1] = -np.inf
    wrong = run(operation, {"x": x})[:, :-1]
    right = {"x": inputs["x"]}
    full = np.concatenate([wrong, run(operation, right)[:, -1:]], axis=1)
    assert ratios(operation, right, full).max() > 1


@pytest.mark.parametrize("operation", ["softmax_backward", "log_softmax_backward"])
def test_a_running_float_sum_breaks_the_bound(operation):
    # A nearly constant gradient: dx is what is left after Σ cancelled dy, so an error of Σ shows in full.
    dy = (0.7 + 1e-6 * np.random.default_rng(32).standard_normal((1, LONG))).astype(np.float32)
    forward = getattr(ig, operation.removesuffix("_backward"))
    inputs = {"dy": dy, "y": forward(np.zeros((1, LONG), np.float32))}
    y = inputs["y"]
    if operation == "softmax_backward":
        wrong = y * (dy - np.cumsum(y * dy, axis=-1, dtype=np.float32)[:, -1:])
    else:
        wrong = dy - np.exp(y) * np.cumsum(dy, axis=-1, dtype=np.float32)[:, -1:]
    assert ratios(operation, inputs, run(operation, inputs)).max() <= 1
    assert ratios(operation, inputs, wrong).max() > 1


# --- two ulp, tail included -----------------------------------------------------------------------------------------
def repeated_rows(dtype, n=3000):
    """Rows of one maximum and one value repeated, whose exponentials err as far as possible in one direction.

    The errors of equal terms do not cancel: the sum is off by n times the error of one.
    """
    of = arrays.numpy_dtype(dtype)
    rng = np.random.default_rng(33)
    rows = []
    for m in (0.0, 0.3, -100.7, 250.0, 300.0, -5e4):
        m = np.array([m], of)
        x = (m - rng.uniform(0, 8, 20_000)).astype(of)
        e, error = numerics.exp_shifted(x, *numerics.exp_shift(m))
        base, _, exponent = numerics.exp_shift(m)
        form = numerics.FORMATS[of]
        wide = np.exp(x.astype(np.longdouble) - base.astype(np.longdouble))
        true = np.ldexp(wide, (form.exp_scale - exponent).astype(np.int32))
        for kept in (e, e.astype(np.longdouble) + error):
            order = np.argsort((kept - true) / true)
            for value in x[np.concatenate([order[:4], order[-4:]])]:
                row = np.full(n, value, of)
                row[0] = m[0]
                row[1:40] = (m[0] - rng.uniform(0, 60, 39)).astype(of)  # a tail to see the error of the sum in
                rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_ulp_where_every_rounding_goes_the_same_way(dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    x = repeated_rows(dtype)
    y = ig.softmax(x)
    worst = ulps(y, ref.oracle_softmax(x), dtype).max()
    assert 0.9 < worst <= 2
    assert ratios("softmax", {"x": x}, y).max() <= 1
    assert ratios("log_softmax", {"x": x}, ig.log_softmax(x)).max() <= 1

    # Without the low parts, that is with a sum of rounded exponentials and a rounded reciprocal, 2 ulp do not hold.
    m = x.max(axis=-1, keepdims=True)
    e, _ = numerics.exp_shifted(x, *numerics.exp_shift(m))
    s = e.astype(np.longdouble).sum(axis=-1, keepdims=True).astype(x.dtype)
    assert ulps(e * (x.dtype.type(1) / s), ref.oracle_softmax(x), dtype).max() > 2


def test_float32_softmax_is_within_two_ulp_over_the_whole_tail():
    rng = np.random.default_rng(34)
    m = np.concatenate([rng.uniform(-300, 300, 60), 10 ** rng.uniform(2, 30, 20)]).astype(np.float32)
    depth = np.sort(rng.uniform(0, 104, (80, 2000)), axis=1)
    depth[:, 0] = 0
    x = (m[:, None] - depth).astype(np.float32)
    y, expected = ig.softmax(x), ref.oracle_softmax(x)
    assert (expected < 2.0**-140).any()
    assert ulps(y, expected, "float32").max() <= 2
    # What rounding x - m costs the tail, as in the usual implementation.
    e = np.exp((x - m[:, None]).astype(np.float64))
    plain = e / e.sum(axis=1, keepdims=True)
    assert ulps(plain, expected, "float32").max() > 5


def test_float32_against_torch_in_float64():
    torch = pytest.importorskip("torch")
    for case, inputs in hurtful("softmax", "float32").items():
        x = torch.from_numpy(inputs["x"]).to(torch.float64)
        wide = torch.softmax(x, -1).numpy()
        y = ig.softmax(inputs["x"])
        np.testing.assert_array_equal(np.isnan(y), np.isnan(wide), err_msg=case)
        keep = ~np.isnan(wide)
        assert not keep.any() or ulps(y, wide, "float32")[keep].max() <= 2.001, case
        wide_log = torch.log_softmax(x, -1).numpy()
        z = ig.log_softmax(inputs["x"])
        finite = np.isfinite(wide_log) & np.isfinite(z)
        # n quanta besides 2 ulp, and what binary64 itself loses of the largest |x|
        slack = x.shape[1] * 2.0**-44 + 2.0**-50 * np.abs(inputs["x"][np.isfinite(inputs["x"])]).max(initial=0)
        allowed = 2 * ulp(wide_log[finite], "float32") + slack
        assert (np.abs(z[finite] - wide_log[finite]) <= allowed).all(), case


def test_log_softmax_keeps_small_terms_beside_a_dominant_one():
    x = np.full((1, 101), -17, np.float32)
    x[0, 50] = 0
    z = float(ig.log_softmax(x)[0, 50])
    decimal.getcontext().prec = 40
    expected = float(-(1 + 100 * decimal.Decimal(-17).exp()).ln())
    bound = 2 * float(np.spacing(np.float32(-expected))) + 101 * 2.0**-44
    assert abs(z - expected) <= bound
    # The logarithm of the rounded sum has lost most of the tail's digits.
    assert abs(-np.log(np.float32(1 + 100 * np.exp(-17.0))) - expected) > 100 * bound


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_float64_against_decimal_arithmetic(kind):
    # An oracle without any libm, and one that also exists where longdouble is binary64.
    rng = np.random.default_rng(35)
    decimal.getcontext().prec = 50
    rows = np.stack([rng.standard_normal(12) * 5, rng.uniform(-700, 0, 12), 3e3 + rng.uniform(0, 40, 12)])
    result = getattr(ig, kind)(rows)
    for x, y in zip(rows, result, strict=True):
        top = decimal.Decimal(float(x.max()))
        e = [(decimal.Decimal(v) - top).exp() for v in x.tolist()]
        s = sum(e)
        for j, value in enumerate(y.tolist()):
            true = e[j] / s if kind == "softmax" else decimal.Decimal(x.tolist()[j]) - top - s.ln()
            error = abs(Fraction(value) - Fraction(true))
            assert error <= 2 * Fraction(float(np.spacing(abs(float(true))))) + len(x) * Fraction(2) ** -88
