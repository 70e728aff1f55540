"""Every loss and gradient within its plan's error bound, on inputs chosen to hurt; and the bound can be broken."""

import ml_dtypes
import numpy as np
import pytest
from cross_entropy_problems import NUMPY, Problem, by_plan, problem, work

import isograd as ig
from isograd.losses import cross_entropy_reference as reference

WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", NUMPY)


def ratio(got, expected, bound):
    """|got - expected| / bound; inf where a special value is wrong, 0 where nothing is promised."""
    with np.errstate(all="ignore"):
        wide = got.astype(np.longdouble)
        error = np.abs(wide - expected) / bound
        error = np.where((wide == expected) | (np.isnan(wide) & np.isnan(expected)) | np.isposinf(bound), 0, error)
        return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0))


def ratios(p, losses, dx):
    plans = (
        (ig.CrossEntropyPlan, ig.CrossEntropyDescriptor),
        (ig.CrossEntropyBackwardPlan, ig.CrossEntropyBackwardDescriptor),
    )
    for_losses, for_dx = (
        plan.select(kind(*p.fields)).precision_guarantee.error_bound for plan, kind in plans
    )  # fmt: skip
    given = p.given | p.options
    exact_losses, _ = reference.oracle_cross_entropy(**given)
    exact_dx = reference.oracle_cross_entropy_backward(p.dlosses, **given)
    return (
        ratio(losses, exact_losses, for_losses(**given)[0]),
        ratio(dx, exact_dx, for_dx(dlosses=p.dlosses, **given)),
    )


def hurtful(dtype):
    rng = np.random.default_rng(10)
    of = NUMPY[dtype]
    big = float(ml_dtypes.finfo(of).max)

    def hard(x, **changes):
        x = np.asarray(x, np.float64).astype(of)
        p = problem(rng, x.shape, of, ignored=0)
        return p._replace(logits=x, **changes)

    for kind in ("hard", "smooth", "probabilities"):
        for weighted in (False, True):
            for z in (0.0, 1e-2):
                yield f"{kind} {weighted} {z}", problem(rng, (20, 300), of, kind=kind, weighted=weighted, z_loss=z)
    yield "offset 1e4", hard(1e4 + 4 * rng.standard_normal((8, 300)))
    yield "offset -1e7", hard(-1e7 + 4 * rng.standard_normal((8, 300)))
    yield "wide", hard(60 * rng.standard_normal((8, 300)))
    yield "overflow", hard(np.array([[big, -big, 0.5 * big, 0]] * 3))
    yield "equal", hard(np.full((2, 70_001), 0.3))
    sure = rng.standard_normal((6, 300))
    sure[:, 5] += 25
    yield "sure and right", hard(sure, targets=np.full(6, 5))
    yield "sure and wrong", hard(sure, targets=np.full(6, 7))
    yield "-inf", hard(np.where(rng.random((6, 300)) < 0.5, -np.inf, 0.5), targets=np.zeros(6, int))
    yield "large gradients", hard(3 * rng.standard_normal((6, 50)), dlosses=np.full(6, 1e30, work(of)))
    yield "small gradients", hard(3 * rng.standard_normal((6, 50)), dlosses=np.full(6, 1e-36, work(of)))
    smooth = problem(rng, (4, 3000), of, kind="smooth", scale=8)
    yield "smoothed, offset", smooth._replace(logits=(smooth.logits.astype(np.float64) + 300).astype(of))
    # The terms cancel: weights of both signs.
    weight = np.where(np.arange(3000) % 2, 1.0, -1.0).astype(work(of))
    yield "cancelling", problem(rng, (4, 3000), of, kind="probabilities")._replace(weight=weight)


@each_dtype
def test_hurtful_inputs_stay_within_the_bound(dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    worst = {}
    for name, p in hurtful(dtype):
        losses, _, dx, *_ = by_plan(p)
        worst[name] = ratios(p, losses, dx)
        assert max(worst[name]) <= 1, (name, worst[name])
    # A bound that nothing comes near would prove nothing.
    assert max(a for a, _ in worst.values()) > 0.05, worst
    assert max(b for _, b in worst.values()) > 0.05, worst


@each_dtype
@pytest.mark.parametrize("kind", ["hard", "smooth", "probabilities"])
def test_small_slips_break_the_bound(dtype, kind):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    p = problem(np.random.default_rng(11), (20, 40), NUMPY[dtype], kind=kind, ignored=0)
    losses, _, dx, *_ = by_plan(p)
    places = 30 if dtype in ("float32", "float64") else 1500
    slipped = (losses.view(f"i{losses.itemsize}") + places).view(losses.dtype)
    assert ratios(p, slipped, dx)[0] > 1
    slipped = (dx.view(f"i{dx.itemsize}") + (30 if dtype in ("float32", "float64") else 2)).view(dx.dtype)
    assert ratios(p, losses, slipped)[1] > 1
    # A class that a loop forgot.
    last = p.logits.copy()
    last[:, -1] = -np.inf
    if kind == "hard":
        wrong = by_plan(p._replace(logits=last, targets=np.zeros(20, int)))
        assert ratios(p._replace(targets=np.zeros(20, int)), wrong[0], dx)[0] > 1


def test_a_bound_for_probabilities_of_both_signs():
    y = np.array([[1e3, -1e3, 1.0]], np.float32)
    p = Problem(np.array([[1.0, 2.0, 3.0]], np.float32), y, None, np.ones(1, np.float32), {})
    losses, _, dx, *_ = by_plan(p)
    assert max(ratios(p, losses, dx)) <= 1
