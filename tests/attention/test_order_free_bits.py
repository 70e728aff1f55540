"""Order-free attention by the API: the reference's bits for every option and engine, within its bound, and refusals."""

import ml_dtypes
import numpy as np
import pytest
from attention_problems import FLAVOURS, exact, exact_backward, make, operands
from test_order_free_reference import DATA, values

import isograd as ig
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDescriptor
from isograd.flash_attention.order_free import bounds, cpu, reference
from isograd.flash_attention.plans import AttentionPlan

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ORDER_FREE = {"preference": "order_free"}


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def run(p, **options):
    o, lse = ig.attention(p.q, p.k, p.v, return_lse=True, **ORDER_FREE, **p.arguments, **options)
    gradients = ig.attention_backward(
        p.do, p.q, p.k, p.v, o, lse, dlse=p.dlse, bias_gradient=False, **ORDER_FREE, **p.arguments
    )
    return o, lse, *[x for x in gradients if x is not None]


def defined(p):
    o, lse = reference.attention(p.q, p.k, p.v, p.options, p.inputs)
    gradients = reference.attention_backward(p.do, p.q, p.k, p.v, o, lse, p.options, p.inputs, p.dlse)
    return o, lse, *[x for x in gradients if x is not None]


def same(found, expected):
    return len(found) == len(expected) and all(
        np.array_equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("flavour", list(FLAVOURS))
def test_bits_are_the_reference_s(flavour):
    rng = np.random.default_rng(4)
    assert same(run(p := make(rng, flavour, "bfloat16")), defined(p))
    sizes = {"q_length": 200, "k_length": 300, "head_dim": 40, "v_dim": 64, "heads": (2, 1)}
    assert same(run(p := make(rng, flavour, "float16", **sizes)), defined(p))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (129, 257)])
def test_lengths(lengths):
    p = make(np.random.default_rng(5), "causal and sinks", "bfloat16", 1, (4, 2), *lengths, 96, 16)
    assert same(run(p), defined(p))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_leave_no_trace(threads):
    p = make(np.random.default_rng(6), "causal", "bfloat16", q_length=300, k_length=300)
    before = ig.get_num_threads()
    try:
        ig.set_num_threads(threads)
        assert same(run(p), defined(p))
    finally:
        ig.set_num_threads(before)


def launched(p, engine):
    """The results of both kernels by an engine."""
    (batch, heads, q_length, head_dim), (_, kv_heads, k_length, v_dim) = p.q.shape, p.v.shape
    sizes = (batch, heads, kv_heads, q_length, k_length, head_dim, v_dim, p.q.dtype.name, p.options)
    arrays = {"q": p.q, "k": p.k, "v": p.v, "o": np.empty((*p.q.shape[:3], v_dim), p.q.dtype)}
    arrays["lse"] = np.empty(p.q.shape[:3], np.float32)
    cpu.attention(AttentionDescriptor(*sizes).validated(), arrays, engine)
    gradients = {name: np.empty_like(arrays[name[1:]]) for name in ("dq", "dk", "dv")}
    descriptor = AttentionBackwardDescriptor(*sizes, dlse=True).validated()
    cpu.attention_backward(descriptor, {**arrays, "do": p.do, "dlse": p.dlse, **gradients}, engine)
    return arrays["o"], arrays["lse"], *gradients.values()


@pytest.mark.thorough
@pytest.mark.parametrize("engine", cpu.engine_names()[1:])
def test_engines_leave_no_trace(engine):
    p = make(np.random.default_rng(7), "causal", "bfloat16", q_length=140, k_length=200)
    assert same(launched(p, engine), defined(p))


def test_a_sequence_alone_in_a_batch_packed_and_decoded():
    q, k, v, _ = values("sink", np.random.default_rng(8), 300, 300, 64)
    o, lse = ig.attention(q, k, v, causal=True, return_lse=True, **ORDER_FREE)
    batch = [np.concatenate([x[:, :, ::-1], x]) for x in (q, k, v)]
    assert np.array_equal(bits(ig.attention(*batch, causal=True, **ORDER_FREE)[1:]), bits(o))
    packed = [np.concatenate([x[:, :, :77], x, x[:, :, :9]], axis=2) for x in (q, k, v)]
    ends = np.array([0, 77, 377, 386], np.int32)
    found = ig.attention(*packed, causal=True, cu_seqlens=(ends, ends), **ORDER_FREE)
    assert np.array_equal(bits(found[:, :, 77:377]), bits(o))
    for i in (0, 127, 128, 299):
        row, sums = ig.attention(
            q[:, :, i : i + 1], *(x[:, :, : i + 1] for x in (k, v)), causal=True, return_lse=True, **ORDER_FREE
        )
        assert np.array_equal(bits(row[:, :, 0]), bits(o[:, :, i]))
        assert sums[0, 0, 0] == lse[0, 0, i]


def ratios(found, exact, bound):
    """The largest errors as fractions of their bounds, which are finite."""
    for mine, right, most in zip(found, exact, bound, strict=True):
        assert np.isfinite(most).all()
        with np.errstate(all="ignore"):
            wrong = np.abs(np.asarray(mine, np.float64) - right)
            yield float(np.max(np.where(mine == right, 0, wrong / most), initial=0))


@pytest.mark.parametrize("name", [*DATA, "one key"])
def test_errors_are_within_the_bound(name):
    q, k, v, do = values(name, np.random.default_rng(9), 200, 400, 64)
    if name == "one key":
        k[0, 0, 7] = q[0, 0].mean(axis=0, dtype=np.float32) * 900
    options, of = reference.AttentionOptions(window=(330, 0)), {}
    o, lse = ig.attention(q, k, v, window=options.window, return_lse=True, **ORDER_FREE)
    gradients = ig.attention_backward(do, q, k, v, o, lse, window=options.window, **ORDER_FREE)
    of["attention"] = bounds.error_bound("attention")(q=q, k=k, v=v, options=options)
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    of["attention_backward"] = bounds.error_bound("attention_backward")(**given, options=options)
    right = reference.dense.oracle_attention(q, k, v, options)
    assert max(ratios((o, lse), right, of["attention"])) <= 1
    right = reference.dense.oracle_attention_backward(do, q, k, v, options, o=o, lse=lse)
    assert max(ratios(gradients[:3], right[:3], of["attention_backward"])) <= 1


@pytest.mark.parametrize("flavour", ["plain", "softcap and sinks", "packed", "bias and mask", "dropout"])
def test_bounds_hold_for_options(flavour):
    p = make(np.random.default_rng(10), flavour, "float16")
    o, lse, *gradients = run(p)
    more = {"options": p.options, **operands(p)}
    bound = bounds.error_bound("attention")(q=p.q, k=p.k, v=p.v, **more)
    assert max(ratios((o, lse), exact(p)[:2], bound)) <= 1
    given = {"do": p.do, "q": p.q, "k": p.k, "v": p.v, "o": o, "lse": lse, "dlse": p.dlse}
    bound = bounds.error_bound("attention_backward")(**given, **more)
    right = exact_backward(p, o, lse, True)._replace(dbias=None)
    assert max(ratios(gradients, [x for x in right if x is not None], bound)) <= 1


def test_special_values_are_the_reference_s():
    p = make(np.random.default_rng(11), "causal, packed", "bfloat16", q_length=120, k_length=150)
    q, k, v, do = (x.copy() for x in (p.q, p.k, p.v, p.do))
    q[0, 1, 40, 3], k[0, 0, 70, 5], v[0, 1, 100, 2], do[0, 2, 60, 1] = np.nan, np.inf, -np.inf, np.nan
    p = p._replace(q=q, k=k, v=v, do=do)
    assert same(run(p), defined(p))
    dlse = p.dlse.copy()
    dlse[0, 0, 5] = np.inf
    p = p._replace(dlse=dlse)
    assert same(run(p), defined(p))


@pytest.mark.parametrize("sink", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_sinks_that_are_not_finite(sink):
    p = make(np.random.default_rng(12), "sinks", "bfloat16")
    sinks = np.array([sink, 0, sink, 1], np.float32)
    p = p._replace(inputs=p.inputs._replace(sinks=sinks))
    assert same(run(p), defined(p))


@pytest.mark.parametrize("bias", [-np.inf, np.inf, np.nan, np.finfo(np.float32).min])
def test_biases_that_are_not_finite(bias):
    p = make(np.random.default_rng(13), "bias", "bfloat16")
    some = p.inputs.bias.astype(np.float32)
    some[0, 1, 3:40], some[1, 2, :, 5:140] = bias, bias
    p = p._replace(inputs=p.inputs._replace(bias=some))
    assert same(run(p), defined(p))


def test_it_has_to_be_asked_for():
    assert AttentionPlan.select(AttentionDescriptor(1, 1, 1, 8, 8, 16, 16, "bfloat16")).kernel.name == "numba"


def test_the_plan_promises_bits():
    plan = AttentionPlan.select(AttentionDescriptor(1, 1, 1, 8, 8, 16, 16, "bfloat16"), preference="order_free")
    promise = plan.precision_guarantee
    assert promise.order_invariant
    assert promise.bit_stable_across_hardware
    assert promise.batch_invariant


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_are_refused(dtype):
    p = make(np.random.default_rng(14), "plain", dtype)
    with pytest.raises(ig.UnsupportedError, match=r"order_free.*registered for"):
        ig.attention(p.q, p.k, p.v, **ORDER_FREE)


def test_the_gradient_of_a_bias_is_refused():
    p = make(np.random.default_rng(15), "bias", "bfloat16")
    o, lse = ig.attention(p.q, p.k, p.v, return_lse=True, **ORDER_FREE, **p.arguments)
    with pytest.raises(ig.UnsupportedError, match="bias_gradient=False"):
        ig.attention_backward(p.do, p.q, p.k, p.v, o, lse, **ORDER_FREE, **p.arguments)


def test_a_preference_that_is_no_name_is_refused():
    p = make(np.random.default_rng(16), "plain", "bfloat16")
    for call in (ig.attention, lambda *a, **kw: ig.attention_backward(p.do, *a, p.v, np.zeros(1), **kw)):
        with pytest.raises(ig.InvalidProblemError, match="preference is 3; expected"):
            call(p.q, p.k, p.v, preference=3)


def test_the_tape_takes_the_same_kernel_back():
    p = make(np.random.default_rng(17), "causal", "bfloat16")
    tape = ig.Tape()
    q, k, v = (tape.leaf(x) for x in (p.q, p.k, p.v))
    o = ig.attention(q, k, v, causal=True, **ORDER_FREE)
    found = tape.backward(o, p.do)
    value, lse = ig.attention(p.q, p.k, p.v, causal=True, return_lse=True, **ORDER_FREE)
    right = ig.attention_backward(p.do, p.q, p.k, p.v, value, lse, causal=True, **ORDER_FREE)
    assert same((o.value, found[q], found[k], found[v]), (value, *right[:3]))
