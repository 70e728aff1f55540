"""What top_k, the router and the losses mean, and that every result is within its plan's bound."""

import ml_dtypes
import numpy as np
import pytest
from router_problems import DTYPES, EACH, SUITES, dtypes_of, plan_of, raw, run, values

import isograd as ig
from isograd.cli.check import worst_error
from isograd.core import arrays
from isograd.core.cases import Case
from isograd.ops.router import operation as declared
from isograd.ops.router import oracle, reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60


# --- bounds -----------------------------------------------------------------------------------------------------------
def worst(operation, case, dtype, got=None):
    """The largest error of the results as a fraction of the bound."""
    got = run(operation, case, dtype) if got is None else got
    exact = getattr(oracle, operation)(**case.inputs, **case.options)
    limits = plan_of(operation, case, dtype).precision_guarantee.error_bound(**case.inputs, **case.options)
    exact, limits = (x if isinstance(x, tuple) else (x,) for x in (exact, limits))
    assert len(exact) == len(limits) == len(got)
    ratios = [worst_error(*each) for each in zip(got, exact, limits, strict=True) if each[1] is not None]
    assert all((limit is None) == (each is None) for limit, each in zip(limits, exact, strict=True))
    return max(ratios, default=0)


@pytest.mark.parametrize(("operation", "dtype"), EACH)
def test_results_stay_within_the_bound(operation, dtype):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    for case in SUITES[operation].cases(dtype):
        assert worst(operation, case, dtype) <= 1, case.name


@pytest.mark.parametrize("operation", [op for op in SUITES if dtypes_of(op) == tuple(DTYPES)])
def test_bounds_can_be_broken(operation):
    # A relative error of 2^-18 is beyond what binary32 allows itself somewhere in every operation.
    broken = 0
    for case in SUITES[operation].cases("float32"):
        got = run(operation, case, "float32")
        slipped = [g * g.dtype.type(1 + 2**-18) if g.dtype == np.float32 else g for g in got]
        with np.errstate(all="ignore"):
            broken += worst(operation, case, "float32", slipped) > 1
    assert broken


@each_dtype
def test_a_sum_that_cancels(dtype):
    # 2^20 terms whose sum is a millionth of the largest, and terms of 1e-12 beside one that goes away.
    rng = np.random.default_rng(0)
    signs = np.where(np.arange(1 << 20) % 2 == 0, 1.0, -1.0)
    p = np.stack([signs * 1e4, np.full(signs.size, 1e-8)], 1).astype(arrays.numpy_dtype(dtype))
    p[rng.integers(signs.size), 0] += 1
    case = Case("", {"probabilities": p, "experts": rng.integers(0, 2, (len(p), 1))})
    (loss,) = run("load_balancing_loss", case, dtype)
    assert worst("load_balancing_loss", case, dtype, (loss,)) <= 1
    shuffled = rng.permutation(len(p))
    again = ig.load_balancing_loss(p[shuffled], case.inputs["experts"][shuffled])
    assert raw(again) == raw(loss)


def test_every_operation_has_a_formula():
    for operation in SUITES:
        assert getattr(declared, operation.upper()).formula


# --- top_k ------------------------------------------------------------------------------------------------------------
@each_dtype
def test_order_of_ties_zeros_and_nan(dtype):
    x = np.array([0.0, np.nan, -0.0, 3, np.inf, 3, -np.nan, 0.0, -np.inf]).astype(arrays.numpy_dtype(dtype))
    v, i = ig.top_k(x, 9)
    assert i.tolist() == [1, 6, 4, 3, 5, 0, 2, 7, 8]
    assert raw(v) == raw(x[i])
    assert i.dtype == np.int64


def test_values_keep_their_bits():
    payload = np.array([0x7FA00001, 0xFFC12345, 0x3F800000], np.uint32).view(np.float32)
    v, i = ig.top_k(payload, 3)
    assert raw(v.view(np.uint32)) == raw(payload.view(np.uint32))
    assert i.tolist() == [0, 1, 2]


@each_dtype
def test_against_sorting(dtype):
    rng = np.random.default_rng(1)
    x = rng.permutation(1000)[:200].reshape(4, 50).astype(arrays.numpy_dtype(dtype))
    for axis, k in ((0, 3), (1, 20), (-1, 50)):
        v, _ = ig.top_k(x, k, axis)
        rows = np.sort(np.moveaxis(x, axis, -1).astype(float), -1)[..., ::-1][..., :k]
        assert v.astype(float).tolist() == np.moveaxis(rows, -1, axis).tolist()


# --- the router -------------------------------------------------------------------------------------------------------
def test_bias_chooses_and_does_not_weigh():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([0, 0, 5, 5], np.float32)
    weights, experts = ig.moe_router(logits, 2, bias=bias)
    assert experts.tolist() == [[2, 3]]
    assert raw(weights) == raw(ig.softmax(logits)[:, 2:])


def test_groups():
    s = np.array([[0.1, 0.91, 0.2, 0.75, 0.7, 0.3, 0.5, 0.6]], np.float32)
    logits = np.log(s / (1 - s)).astype(np.float32)
    _, experts = ig.moe_router(logits, 2, scoring="sigmoid", groups=4, group_k=2)
    # Sums of the groups: 1.01, 0.95, 1.0, 1.1.
    assert experts.tolist() == [[1, 7]]
    _, experts = ig.moe_router(logits, 2, scoring="sigmoid", groups=4, group_k=1)
    assert experts.tolist() == [[7, 6]]
    _, experts = ig.moe_router(logits, 3, scoring="sigmoid", groups=4, group_k=4)
    assert experts.tolist() == [[1, 3, 4]]


def test_equal_groups_and_experts_go_by_index():
    _, experts = ig.moe_router(np.zeros((1, 12), np.float32), 4, groups=4, group_k=2)
    assert experts.tolist() == [[0, 1, 2, 3]]


@each_dtype
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_tokens_without_numbers(dtype, scoring):
    logits = np.zeros((4, 6), arrays.numpy_dtype(dtype))
    logits[0, 4] = np.nan
    logits[1] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    weights, experts = ig.moe_router(logits, 3, scoring=scoring, renormalize=True)
    if scoring == "softmax":
        assert np.isnan(weights).all()
        assert experts.tolist() == [[0, 1, 2]] * 4
        assert np.isnan(ig.moe_router_backward(weights * 0 + 1, logits, experts).astype(float)).all()
    else:
        assert experts.tolist() == [[4, 0, 1], [0, 1, 2], [3, 0, 1], [0, 1, 2]]
        assert np.isnan(weights[:2]).all()
        assert weights[2].tolist() == [0.5, 0.25, 0.25]
        assert weights[3].tolist() == [0, 0, 0]
    nan = weights[np.isnan(weights)]
    assert (nan.view(f"u{nan.itemsize}") == np.array(np.nan, nan.dtype).view(f"u{nan.itemsize}")).all()


def test_a_nan_reaches_its_own_token_only():
    x = values(np.random.default_rng(2), "normal", (5, 40), "float32")
    clean, experts = ig.moe_router(x, 4)
    gradient = ig.moe_router_backward(clean, x, experts)
    x[2, 7] = np.nan
    weights, _ = ig.moe_router(x, 4)
    keep = [0, 1, 3, 4]
    assert raw(weights[keep]) == raw(clean[keep])
    assert raw(ig.moe_router_backward(clean, x, experts)[keep]) == raw(gradient[keep])


def test_selection_does_not_change_on_recomputation_or_padding():
    x = np.rint(values(np.random.default_rng(3), "normal", (200, 64), "float32"))
    first = ig.moe_router(x, 6)
    padded = np.pad(x, ((3, 5), (0, 0)))
    again = ig.moe_router(padded, 6)
    assert [raw(a[3:-5]) for a in again] == [raw(a) for a in first]


# --- renormalize ------------------------------------------------------------------------------------------------------
def test_sums_of_zero():
    w = np.array([[0.0, -0.0], [1.0, -1.0], [0.25, 0.75]], np.float32)
    assert ig.renormalize(w).tolist() == [[0, 0], [0, 0], [0.25, 0.75]]
    assert not ig.renormalize_backward(np.ones_like(w), w)[:2].any()


# --- permutation ------------------------------------------------------------------------------------------------------
@each_dtype
def test_there_and_back(dtype):
    rng = np.random.default_rng(4)
    x = values(rng, "normal", (50, 7), dtype)
    _, experts = ig.moe_router(values(rng, "normal", (50, 16), dtype), 4)
    order, offsets = ig.expert_permutation(experts, 16)
    rows = ig.moe_permute(x, order, 4)
    for e in range(16):
        part = order[offsets[e] : offsets[e + 1]]
        assert (experts.reshape(-1)[part] == e).all()
        assert (np.diff(part) > 0).all()
        assert raw(rows[offsets[e] : offsets[e + 1]]) == raw(x[part // 4])
    quarter = np.full((50, 4), 0.25, "float64" if dtype == "float64" else "float32")
    assert raw(ig.moe_combine(rows, quarter, order)) == raw(x)
    assert raw(ig.moe_permute_backward(rows, order, 4)) == raw(x * x.dtype.type(4))


# --- losses -----------------------------------------------------------------------------------------------------------
def test_an_even_load_costs_one():
    p = np.full((64, 8), 1 / 8, np.float32)
    even = np.arange(128).reshape(64, 2) % 8
    assert ig.load_balancing_loss(p, even) == 1
    assert ig.load_balancing_loss(np.eye(8, dtype=np.float32)[np.zeros(64, int)], np.zeros((64, 1), int)) == 8
    assert ig.load_balancing_loss(p.reshape(8, 8, 8), even.reshape(8, 8, 2), 8) == 1


def test_z_loss_of_ordinary_and_special_tokens():
    assert ig.router_z_loss(np.zeros((3, 1), np.float32)) == 0
    assert abs(ig.router_z_loss(np.zeros((3, 8), np.float64)) - np.log(8.0) ** 2) < 1e-15
    for value in (np.inf, -np.inf):
        x = np.zeros((3, 4), np.float32)
        x[1, : 1 if value > 0 else 4] = value
        assert ig.router_z_loss(x) == np.inf
    assert np.isnan(ig.router_z_loss(np.array([[np.nan, np.inf]], np.float32)))


@each_dtype
def test_no_tokens(dtype):
    empty = np.zeros((0, 4), arrays.numpy_dtype(dtype))
    experts = np.zeros((0, 2), np.int64)
    weights, chosen = ig.moe_router(empty, 2)
    assert weights.shape == chosen.shape == (0, 2)
    assert ig.moe_router_backward(weights, empty, chosen).shape == (0, 4)
    assert np.isnan(ig.load_balancing_loss(empty, experts))
    assert np.isnan(ig.router_z_loss(empty))
    order, offsets = ig.expert_permutation(experts, 3)
    assert order.shape == (0,)
    assert offsets.tolist() == [0] * 4
    assert ig.moe_permute(empty, order, 2).shape == (0, 4)
    assert ig.moe_combine(empty, weights, order).shape == (0, 4)
    assert ig.top_k(empty, 3)[0].shape == (0, 3)


# --- kinds of arrays --------------------------------------------------------------------------------------------------
def test_tensors_and_arrays_with_dlpack():
    torch = pytest.importorskip("torch")
    x = values(np.random.default_rng(5), "normal", (6, 12), "float32")
    t = torch.from_numpy(x.copy())
    for function in (lambda a: ig.moe_router(a, 3), lambda a: ig.top_k(a, 3), lambda a: (ig.renormalize(a),)):
        for got, wanted in zip(function(t), function(x), strict=True):
            assert isinstance(got, torch.Tensor)
            assert raw(got.numpy()) == raw(wanted)
    half = t.to(torch.bfloat16)
    weights, experts = ig.moe_router(half, 3)
    assert weights.dtype is torch.float32
    gradient = ig.moe_router_backward(weights, half, experts)
    assert gradient.dtype is torch.bfloat16
    weights, experts = ig.moe_router(t.requires_grad_(), 3)
    weights.sum().backward()
    ones = np.ones((6, 3), np.float32)
    assert raw(t.grad.numpy()) == raw(ig.moe_router_backward(ones, x, experts.numpy()))


def test_sixteen_bits_are_widened_first():
    x = values(np.random.default_rng(6), "normal", (6, 12), "bfloat16")
    assert x.dtype == ml_dtypes.bfloat16
    weights, experts = ig.moe_router(x, 3)
    wide = ig.moe_router(x.astype(np.float32), 3)
    assert [raw(weights), raw(experts)] == [raw(a) for a in wide]
    assert raw(weights) == raw(np.take_along_axis(reference.scores(x), experts, -1))
