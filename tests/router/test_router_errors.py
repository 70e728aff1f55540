"""Bad input to the router family gets a clear error, before anything is written."""

import numpy as np
import pytest

import isograd as ig


def refused(call, kind, *fragments):
    with pytest.raises(ig.IsogradError) as caught:
        call()
    assert type(caught.value) is kind
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)


def array(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


LOGITS, WORK = array(4, 6), array(4, 2)
EXPERTS, ORDER = np.array([[0, 1], [2, 3], [4, 5], [0, 5]]), np.arange(8)[::-1].copy()
INVALID, OUTSIDE = ig.InvalidProblemError, ig.IndexOutOfRangeError


@pytest.mark.parametrize("k", [0, -1, 7, 10**30])
def test_k_out_of_range(k):
    refused(lambda: ig.top_k(LOGITS, k), INVALID, "top_k", f"k is {k}", "1 to 6")
    refused(lambda: ig.moe_router(LOGITS, k), INVALID, "moe_router", f"k is {k}", "1 to 6")


@pytest.mark.parametrize("k", [1.0, "2", None, [1]])
def test_k_that_is_no_integer(k):
    ig.top_k(LOGITS, 1)
    refused(lambda: ig.top_k(LOGITS, k), INVALID, "top_k", "k is", repr(k), "integers")
    refused(lambda: ig.moe_router(LOGITS, k), INVALID, "moe_router", "k is", repr(k), "integers")


def test_axes():
    for function in (lambda a: ig.top_k(LOGITS, 1, a), lambda a: ig.renormalize(LOGITS, a)):
        refused(lambda f=function: f(2), INVALID, "axis is 2", "-2 to 1")
        refused(lambda f=function: f(0.5), INVALID, "axis is 0.5", "integers")
    refused(lambda: ig.top_k(array(), 1), INVALID, "top_k", "rank 0", "1 to 8")


def test_router_options():
    for options, fragments in (
        ({"scoring": "tanh"}, ("scoring", "'tanh'", "softmax, sigmoid")),
        ({"scoring": None}, ("scoring", "None")),
        ({"renormalize": 1}, ("renormalize is 1", "True or False")),
        ({"scale": float("nan")}, ("scale is nan", "finite")),
        ({"scale": "2"}, ("scale is '2'", "finite")),
        ({"scale": 1e39}, ("scale is 1e+39", "finite in float32")),
        ({"scale": 10**400}, ("scale is", "beyond the range of floats")),
        ({"scale": [2.0]}, ("scale is [2.0]", "finite")),
        ({"groups": 4}, ("groups is 4", "divisor of 6")),
        ({"groups": 0}, ("groups is 0", "at least 1")),
        ({"groups": 3, "group_k": 4}, ("group_k is 4", "1 to 3")),
        ({"groups": 3, "group_k": 1.0}, ("group_k is 1.0", "integers")),
        ({"groups": 6, "group_k": 1}, ("k is 2", "1 to 1")),
    ):
        refused(lambda options=options: ig.moe_router(LOGITS, 2, **options), INVALID, "moe_router", *fragments)


def test_bias():
    name = "moe_router"
    refused(lambda: ig.moe_router(LOGITS, 2, bias=array(5)), INVALID, name, "bias", "(5,)", "(6,)")
    refused(lambda: ig.moe_router(LOGITS, 2, bias=array(6, dtype=np.float64)), INVALID, name, "bias", "float64")
    half = LOGITS.astype(np.float16)
    refused(lambda: ig.moe_router(half, 2, bias=half[0]), INVALID, name, "bias", "float16", "float32")
    refused(lambda: ig.moe_router(LOGITS, 2, bias=[0.0] * 6), INVALID, name, "bias", "list")


@pytest.mark.parametrize("function", [lambda x: ig.top_k(x, 1), lambda x: ig.moe_router(x, 1), ig.router_z_loss])
def test_dtypes(function):
    refused(lambda: function(np.zeros((2, 3), np.int32)), ig.UnsupportedError, "int32", "float16")
    refused(lambda: function([[1.0]]), INVALID, "list")
    refused(lambda: function(np.ma.masked_array(LOGITS)), INVALID, "masked")


def test_shapes_that_do_not_fit():
    refused(lambda: ig.moe_router_backward(WORK, LOGITS, EXPERTS[:3]), INVALID, "experts", "(3, 2)", "(4, 2)")
    refused(lambda: ig.moe_router_backward(WORK[:3], LOGITS, EXPERTS), INVALID, "dweights", "(3, 2)", "(4, 2)")
    refused(lambda: ig.moe_router_backward(array(4, 7), LOGITS, array(4, 7) > 0), ig.UnsupportedError, "bool")
    refused(lambda: ig.renormalize_backward(WORK, LOGITS), INVALID, "dt", "(4, 2)", "(4, 6)")
    refused(lambda: ig.moe_permute(LOGITS, ORDER[:-1], 2), INVALID, "order", "(7,)", "(8,)")
    refused(lambda: ig.moe_permute(LOGITS[0], ORDER, 2), INVALID, "x has shape (6,)", "2 dimensions")
    refused(lambda: ig.moe_permute_backward(array(8, 3), ORDER, 3), INVALID, "k is 3", "divisor of 8")
    refused(lambda: ig.moe_permute_backward(array(8, 3), ORDER, 0), INVALID, "k is 0")
    refused(lambda: ig.moe_combine(array(7, 3), WORK, ORDER), INVALID, "expert_out", "(7, 3)", "(8, 3)")
    refused(lambda: ig.moe_combine(array(8, 3), WORK[0], ORDER), INVALID, "weights", "2 dimensions")
    refused(lambda: ig.moe_combine(array(8, 3), WORK, ORDER.astype(np.int32)), INVALID, "order", "int32", "int64")
    refused(lambda: ig.moe_combine_backward(array(4, 4), array(8, 3), WORK, ORDER), INVALID, "dy", "(4, 4)", "(4, 3)")
    refused(lambda: ig.load_balancing_loss(LOGITS, EXPERTS[:3]), INVALID, "experts", "(3, 2)", "(4, 2)")
    refused(lambda: ig.load_balancing_loss(LOGITS, EXPERTS, 7), INVALID, "num_experts is 7", "6 columns")
    refused(lambda: ig.router_z_loss(array(3, 0)), INVALID, "router_z_loss", "0")
    refused(lambda: ig.router_z_loss_backward(array(1), LOGITS), INVALID, "dloss", "(1,)", "()")
    refused(lambda: ig.expert_counts(EXPERTS, 0), INVALID, "num_experts is 0", "at least 1")
    refused(lambda: ig.expert_counts(EXPERTS, 2.0), INVALID, "num_experts is 2.0", "integers")
    refused(lambda: ig.expert_counts(WORK, 6), ig.UnsupportedError, "experts", "float32", "int64")


@pytest.mark.parametrize("value", [-1, 6, 10**9])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_experts_out_of_range(value, dtype):
    experts = EXPERTS.astype(dtype)
    experts[2, 1] = value
    fragments = (f"experts[2, 1] is {value}", "0 to 5")
    for name, call in (
        ("moe_router_backward", lambda: ig.moe_router_backward(WORK, LOGITS, experts)),
        ("expert_counts", lambda: ig.expert_counts(experts, 6)),
        ("expert_permutation", lambda: ig.expert_permutation(experts, 6)),
        ("load_balancing_loss", lambda: ig.load_balancing_loss(LOGITS, experts)),
        (
            "load_balancing_loss_backward",
            lambda: ig.load_balancing_loss_backward(np.array(1, np.float32), experts, LOGITS.shape),
        ),
    ):
        refused(call, OUTSIDE, name, *fragments)


def test_unsigned_experts_out_of_range():
    experts = EXPERTS.astype(np.uint32)
    experts[3, 0] = 2**32 - 1
    refused(lambda: ig.expert_counts(experts, 6), OUTSIDE, "experts[3, 0] is 4294967295")


def test_the_first_of_several_bad_experts_is_named():
    experts = np.zeros(100_000, np.int64)
    experts[[99_999, 40_000, 70_000]] = 9
    refused(lambda: ig.expert_counts(experts, 9), OUTSIDE, "experts[40000] is 9", "0 to 8")


def test_orders_that_are_no_permutations():
    rows = array(8, 3)
    calls = (
        lambda order: ig.moe_permute_backward(rows, order, 2),
        lambda order: ig.moe_combine(rows, WORK, order),
        lambda order: ig.moe_combine_backward(array(4, 3), rows, WORK, order),
    )
    for value in (-1, 8):
        order = ORDER.copy()
        order[5] = value
        for call in (*calls, lambda order: ig.moe_permute(array(4, 3), order, 2)):
            refused(lambda call=call, order=order: call(order), OUTSIDE, f"order[5] is {value}", "0 to 7")
    order = ORDER.copy()
    order[5] = order[1]
    for call in calls:
        refused(lambda call=call: call(order), INVALID, "order[5] is 6", "permutation")


def test_nothing_is_written_before_an_error():
    out = np.full((4, 6), 7, np.float32)
    plan = ig.MoeRouterBackwardPlan.select(ig.MoeRouterBackwardDescriptor((4, 6), 2, "float32"))
    experts = EXPERTS.copy()
    experts[3, 1] = 6
    refused(lambda: plan.run(dweights=WORK, logits=LOGITS, experts=experts, dlogits=out), OUTSIDE, "experts[3, 1]")
    assert (out == 7).all()
    order, offsets = np.full(8, 7), np.full(7, 7)
    plan = ig.ExpertPermutationPlan.select(ig.ExpertPermutationDescriptor((4, 2), 6))
    refused(lambda: plan.run(experts=experts, order=order, offsets=offsets), OUTSIDE, "experts[3, 1]")
    assert (order == 7).all()
    assert (offsets == 7).all()


def test_outputs_that_overlap():
    x = array(4, 6)
    plan = ig.TopKPlan.select(ig.TopKDescriptor((4, 6), 6, "float32"))
    indices = np.empty((4, 6), np.int64)
    refused(lambda: plan.run(x=x, values=x, indices=indices), INVALID, "values overlaps x")
    plan = ig.RenormalizePlan.select(ig.RenormalizeDescriptor((4, 5), "float32"))
    refused(lambda: plan.run(w=x[:, :5], t=x[:, 1:]), INVALID, "t overlaps w in part")


def test_devices_without_a_kernel():
    descriptor = ig.TopKDescriptor((4, 6), 2, "float32")
    refused(lambda: ig.TopKPlan.select(descriptor, "abacus"), ig.UnsupportedError, "top_k", "'abacus'", "cpu")
    refused(lambda: ig.TopKPlan.select("top_k"), INVALID, "TopKDescriptor")


@pytest.mark.thorough
def test_the_scale_only_has_to_fit_into_the_work_type():
    logits = LOGITS.astype(np.float64)
    assert np.array_equal(ig.moe_router(logits, 2, scale=1e39).weights, ig.moe_router(logits, 2).weights * 1e39)
    largest = float(np.finfo(np.float32).max)
    assert np.array_equal(ig.moe_router(LOGITS, 1, scale=largest).weights, ig.moe_router(LOGITS, 1).weights * largest)


def test_a_shape_that_is_none():
    dloss = np.ones((), np.float32)
    for shape in (4, (4, 6.0), (4, "6")):
        call = lambda shape=shape: ig.load_balancing_loss_backward(dloss, EXPERTS, shape)  # noqa: E731
        refused(call, INVALID, "load_balancing_loss_backward", "shape is", "integers")
