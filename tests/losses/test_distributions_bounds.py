"""Every result within its plan's error bound, on inputs chosen to hurt; and bounds that can be broken."""

import ml_dtypes
import numpy as np
import pytest
from distributions import DTYPES, log_softmax, named, softmax, work

import isograd as ig
from isograd.ops.distillation_loss import reference as divergence_reference
from isograd.ops.gumbel_softmax import reference as gumbel_reference
from isograd.ops.kl_div import reference as kl_reference
from isograd.ops.sparsemax import reference as sparsemax_reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60


def bound_of(operation, dtype):
    """The bound that the plan of an operation promises."""
    name = np.dtype(dtype).name
    plans = {
        "kl_div": (ig.KlDivPlan, ig.KlDivDescriptor),
        "kl_div_backward": (ig.KlDivBackwardPlan, ig.KlDivBackwardDescriptor),
        "distillation_loss": (ig.DistillationLossPlan, ig.DistillationLossDescriptor),
        "distillation_loss_backward": (ig.DistillationLossBackwardPlan, ig.DistillationLossBackwardDescriptor),
        "gumbel_softmax": (ig.GumbelSoftmaxPlan, ig.GumbelSoftmaxDescriptor),
        "gumbel_softmax_backward": (ig.GumbelSoftmaxBackwardPlan, ig.GumbelSoftmaxBackwardDescriptor),
        "sparsemax": (ig.SparsemaxPlan, ig.SparsemaxDescriptor),
        "sparsemax_backward": (ig.SparsemaxBackwardPlan, ig.SparsemaxBackwardDescriptor),
    }
    plan, descriptor = plans[operation]
    return plan.select(descriptor((2, 3), name)).precision_guarantee.error_bound


def oracle(operation):
    for module in (divergence_reference, gumbel_reference, kl_reference, sparsemax_reference):
        if hasattr(module, f"oracle_{operation}"):
            return getattr(module, f"oracle_{operation}")
    raise AssertionError(operation)


def ratio(operation, inputs, result=None, **options):
    """The largest |result - exact| / bound; inf where a special value is wrong or a finite result has no bound."""
    dtype = next(inputs[k] for k in ("input", "student", "logits", "x", "y") if k in inputs).dtype
    with np.errstate(all="ignore"):
        result = getattr(ig, operation)(**inputs, **options) if result is None else result
        expected = np.asarray(oracle(operation)(**inputs, **options))
        limit = np.asarray(bound_of(operation, dtype)(**inputs, **options))
        assert limit.shape == expected.shape == result.shape
        error = np.abs(result.astype(np.longdouble) - expected)
        same = (np.isnan(result) & np.isnan(expected)) | (result.astype(np.longdouble) == expected)
        r = np.where(same | np.isposinf(limit), 0, error / limit)
        largest = float(ml_dtypes.finfo(result.dtype).max)
        assert (np.isfinite(limit) | ~(np.abs(expected) <= largest / 4)).all()
    return float(np.max(np.where(np.isnan(r), np.inf, r), initial=0))


def pairs(dtype):
    """Name → (student, teacher): rows of logits that hurt."""
    rng = np.random.default_rng(40)
    x, t = rng.standard_normal((4, 300)), rng.standard_normal((4, 300))
    masked = np.where(rng.random((4, 300)) < 0.4, -np.inf, 0)
    some = {
        "ordinary": (x, t),
        "spread": (30 * x, 30 * t),
        "wide spread": (300 * x, 300 * t),
        "close": (x, x + 2.0**-9 * t),
        "equal": (x, x),
        "offset": (x + 1000, t - 3000),
        "far offset": (x - 6e4, t - 6e4) if dtype == np.float16 else (x - 1e7, t - 1e7),
        "masked alike": (x + masked, t + masked),
        "a teacher that is sure": (x, t + 60 * (np.arange(300) == 7)),
        "a student that is sure": (x + 60 * (np.arange(300) == 7), t),
        "one class": (x[:, :1], t[:, :1]),
        "long rows": (rng.standard_normal((2, 9001)), 3 * rng.standard_normal((2, 9001))),
    }
    with np.errstate(all="ignore"):
        return {name: tuple(a.astype(dtype) for a in both) for name, both in some.items()}


@each_dtype
@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.7, 0.3])
def test_distillation(dtype, temperature):
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than float64 here")
    rng = np.random.default_rng(41)
    for name, (x, t) in pairs(dtype).items():
        for reduction in ("none", "batchmean"):
            options = {"temperature": temperature, "reduction": reduction}
            g = rng.standard_normal(4 if reduction == "none" else ()) if name != "long rows" else np.ones(())
            if name == "long rows" and reduction == "none":
                continue
            g = np.asarray(g, work(dtype))
            inputs = {"student": x, "teacher": t}
            assert ratio("distillation_loss", inputs, **options) <= 1, name
            assert ratio("distillation_loss_backward", {"dloss": g} | inputs, **options) <= 1, name
            for k in (1, min(12, x.shape[1])):
                kept, indices = named(rng, t, k)
                inputs = {"student": x, "teacher": kept, "indices": indices}
                assert ratio("distillation_loss", inputs, **options) <= 1, (name, k)
                assert ratio("distillation_loss_backward", {"dloss": g} | inputs, **options) <= 1, (name, k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_close_distributions_keep_their_difference(dtype):
    # A divergence of 1e-7: log-probabilities rounded before they are subtracted would leave nothing of it in float32.
    rng = np.random.default_rng(42)
    x = rng.standard_normal((8, 50)).astype(dtype)
    t = (x + 2.0**-11 * rng.standard_normal((8, 50))).astype(dtype)
    exact = divergence_reference.oracle_distillation_loss(x, t, reduction="none")
    assert (exact < 5e-7).all()
    relative = np.abs(ig.distillation_loss(x, t, reduction="none") - exact) / exact
    rounded = (softmax(t) * (log_softmax(t) - log_softmax(x))).sum(-1)
    assert relative.max() < (0.02 if dtype == np.float32 else 1e-8)
    if dtype == np.float32:
        assert (np.abs(rounded - exact) / exact).max() > 0.2


@each_dtype
def test_kl_div(dtype):
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than float64 here")
    rng = np.random.default_rng(43)
    for name, (x, t) in pairs(dtype).items():
        for log_target in (False, True):
            target = (log_softmax if log_target else softmax)(t)
            inputs = {"input": log_softmax(x), "target": target}
            for reduction in ("none", "sum", "mean", "batchmean"):
                options = {"reduction": reduction, "log_target": log_target}
                g = np.asarray(rng.standard_normal(x.shape if reduction == "none" else ()), work(dtype))
                assert ratio("kl_div", inputs, **options) <= 1, name
                for wrt in ("input", "target"):
                    assert ratio("kl_div_backward", {"dloss": g} | inputs, **options, wrt=wrt) <= 1, (name, wrt)


@each_dtype
@pytest.mark.parametrize("tau", [1.0, 0.5, 0.07, 9.0])
def test_gumbel_softmax(dtype, tau):
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than float64 here")
    rng = np.random.default_rng(44)
    for name, (x, t) in pairs(dtype).items():
        for seed in (0, 2**63 + 5):
            assert ratio("gumbel_softmax", {"logits": x}, tau=tau, seed=seed) <= 1, name
            assert ratio("gumbel_softmax", {"logits": x}, tau=tau, seed=seed, hard=True) <= 1, name
        dy = rng.standard_normal(t.shape).astype(dtype)
        assert ratio("gumbel_softmax_backward", {"dy": dy, "y": softmax(x)}, tau=tau) <= 1, name


@each_dtype
def test_sparsemax(dtype):
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than float64 here")
    rng = np.random.default_rng(45)
    for name, (x, t) in pairs(dtype).items():
        for scale in (1, 0.1, 0.001):
            rows = (x * np.array(scale, dtype)).astype(dtype)
            assert ratio("sparsemax", {"x": rows}) <= 1, (name, scale)
            y = ig.sparsemax(rows)
            dy = rng.standard_normal(t.shape).astype(dtype)
            assert ratio("sparsemax_backward", {"dy": dy, "y": y}) <= 1, (name, scale)
            dy = (dy + np.array(1000, dtype)).astype(dtype)
            assert ratio("sparsemax_backward", {"dy": dy, "y": y}) <= 1, (name, scale)


def test_ties_at_the_threshold():
    # Two elements stand exactly at the threshold of the first: neither belongs to the support.
    x = np.array([[1.0, 0.0, 0.0, -1.0], [0.5, -0.5, -0.5, 0.25], [2.0, 2.0, 2.0, 1.0]], np.float32)
    np.testing.assert_array_equal(ig.sparsemax(x[0]), [1, 0, 0, 0])
    np.testing.assert_array_equal(ig.sparsemax(x[1]), [0.625, 0, 0, 0.375])
    np.testing.assert_array_equal(ig.sparsemax(x[2]), np.float32([1 / 3, 1 / 3, 1 / 3, 0]))
    for n in (1, 2, 3, 1000, 5001):
        np.testing.assert_array_equal(ig.sparsemax(np.full(n, 17.3, np.float32)), np.full(n, 1 / np.float32(n)))
    # A difference of one unit in the last place decides.
    assert ig.sparsemax(np.array([1.0, 0.0], np.float32))[1] == 0
    assert ig.sparsemax(np.array([1.0, 2.0**-20], np.float32))[1] > 0


def test_bounds_can_be_broken():
    rng = np.random.default_rng(46)
    x, t = (rng.standard_normal((4, 300)).astype(np.float32) for _ in range(2))
    g, p = np.ones((), np.float32), softmax(t)
    kept, indices = named(rng, t, 5)
    cases = [
        ("kl_div", {"input": log_softmax(x), "target": p}, {}),
        ("kl_div_backward", {"dloss": g, "input": log_softmax(x), "target": p}, {}),
        ("distillation_loss", {"student": x, "teacher": t}, {}),
        ("distillation_loss", {"student": x, "teacher": kept, "indices": indices}, {}),
        ("distillation_loss_backward", {"dloss": g, "student": x, "teacher": t}, {}),
        ("distillation_loss_backward", {"dloss": g, "student": x, "teacher": kept, "indices": indices}, {}),
        ("gumbel_softmax", {"logits": x}, {}),
        ("gumbel_softmax_backward", {"dy": t, "y": p}, {}),
        ("sparsemax", {"x": x}, {}),
        ("sparsemax_backward", {"dy": t, "y": ig.sparsemax(x)}, {}),
    ]
    for operation, inputs, options in cases:
        exact = np.asarray(oracle(operation)(**inputs, **options)).astype(np.float32)
        largest = np.max(np.abs(exact))
        off = exact + np.where(np.abs(exact) == largest, largest * np.float32(1e-4), np.float32(0))
        assert ratio(operation, inputs, exact, **options) <= 1, operation
        assert ratio(operation, inputs, off.astype(np.float32), **options) > 1, operation
