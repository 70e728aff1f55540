"""Rows that see nothing, sequences without rows, not-finite values, extreme scores, dropout's share, recordings."""

import numpy as np
import pytest
import torch
from attention_problems import make, run

import isograd as ig
from isograd.core import registry
from isograd.flash_attention import reference
from isograd.flash_attention.bounds import error_bound
from isograd.flash_attention.options import AttentionOptions


def arrays(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def everything(do, q, k, v, **options):
    o, lse = ig.attention(q, k, v, return_lse=True, **options)
    return o, lse, ig.attention_backward(do, q, k, v, o, lse, **options)


HIDING = {
    "causal, more queries than keys": {"causal": True},
    "mask": {"mask": np.arange(90)[:, None] >= 50},
    "bias of -inf": {"bias": np.where(np.arange(90)[:, None] >= 50, 0, -np.inf).astype(np.float32)},
    "segments": {"segment_ids": (np.repeat(np.int32([[7, 1]]), [50, 40], 1), np.ones((1, 40), np.int32))},
    "window": {"window": (3, 0)},
}


@pytest.mark.parametrize("hiding", HIDING)
def test_rows_that_see_nothing(hiding):
    """The first 50 of 90 queries see none of 40 keys."""
    do, q, k, v = arrays((1, 2, 90, 32), (1, 2, 90, 16), (1, 2, 40, 16), (1, 2, 40, 32))
    o, lse, g = everything(do, q, k, v, **HIDING[hiding])
    assert not np.any(o[:, :, :50])
    assert np.all(lse[:, :, :50] == -np.inf)
    assert not np.any(g.dq[:, :, :50])
    assert np.all(np.isfinite(lse[:, :, 50:]))
    assert np.any(g.dq[:, :, 51:])
    assert all(np.all(np.isfinite(x)) for x in (o, *g[:3]))
    do[:, :, :50] *= 1e6  # and what hidden rows are given has no effect
    again = everything(do, q, k, v, **HIDING[hiding])
    assert again[2].dk.tobytes() == g.dk.tobytes()
    assert again[2].dv.tobytes() == g.dv.tobytes()


def test_a_sink_keeps_the_sum_of_a_row_that_sees_nothing():
    do, q, k, v, sinks = arrays((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 4, 16), (1, 2, 4, 16), (2,))
    o, lse, g = everything(do, q, k, v, causal=True, sinks=sinks)
    assert not np.any(o[:, :, :5])
    assert np.array_equal(lse[0, :, :5], np.repeat(sinks[:, None], 5, 1))
    assert np.all(np.isfinite(g.dsinks))
    none = everything(do, q, k, v, causal=True, sinks=np.full(2, -np.inf, np.float32))
    without = everything(do, q, k, v, causal=True)
    for x, y in zip((*none[:2], *none[2][:3]), (*without[:2], *without[2][:3]), strict=True):
        assert x.tobytes() == y.tobytes()
    assert not np.any(none[2].dsinks)


@pytest.mark.parametrize(("q_length", "k_length"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_at_all(q_length, k_length, dtype):
    p = make(np.random.default_rng(0), "bias of heads and keys", dtype, q_length=q_length, k_length=k_length)
    o, lse, g = run(p)
    assert o.shape == p.do.shape
    assert not np.any(o)
    assert np.all(lse == -np.inf)
    for gradient, x in zip(g, (p.q, p.k, p.v, p.inputs.bias), strict=False):
        assert gradient.shape == x.shape
        assert not np.any(gradient)


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16)])
def test_no_batch_and_no_heads(shape):
    x = np.zeros(shape, np.float32)
    o, lse, g = everything(x, x, x, x)
    assert o.shape == shape
    assert lse.shape == shape[:3]
    assert [y.shape for y in g[:3]] == [shape] * 3
    assert ig.attention_delta(x, x).shape == shape[:3]


def test_packed_sequences_without_rows():
    do, q, k, v = arrays((1, 1, 20, 16), (1, 1, 20, 16), (1, 1, 30, 16), (1, 1, 30, 16))
    ends = np.array([0, 0, 7, 7, 15, 15], np.int32), np.array([0, 4, 4, 12, 25, 25], np.int32)
    o, lse, g = everything(do, q, k, v, cu_seqlens=ends)
    exact, exact_lse = reference.oracle_attention(q, k, v, inputs=reference.Inputs(cu_seqlens=ends))
    assert np.allclose(o, exact, atol=1e-6)
    assert np.array_equal(np.isfinite(lse), np.isfinite(exact_lse))
    assert not np.any(o[:, :, :7])  # a sequence without keys
    assert not np.any(o[:, :, 15:])  # rows of no sequence
    assert np.all(lse[:, :, 15:] == -np.inf)
    assert not np.any(g.dk[:, :, :12])  # sequences without queries
    assert not np.any(g.dv[:, :, 25:])
    assert not np.any(g.dq[:, :, 15:])
    none = np.zeros(1, np.int32)
    o, lse, g = everything(do, q, k, v, cu_seqlens=(none, none))
    assert not any(np.any(x) for x in (o, *g[:3]))


def test_values_that_are_not_finite():
    do, q, k, v = arrays((1, 1, 70, 16), (1, 1, 70, 16), (1, 1, 300, 16), (1, 1, 300, 16))
    right = everything(do, q, k, v)
    q[0, 0, 3, 5] = np.nan
    o, lse, g = everything(do, q, k, v)
    others = np.arange(70) != 3
    assert np.all(np.isnan(o[0, 0, 3]))
    assert np.isnan(lse[0, 0, 3])
    assert o[0, 0, others].tobytes() == right[0][0, 0, others].tobytes()
    assert g.dq[0, 0, others].tobytes() == right[2].dq[0, 0, others].tobytes()
    assert np.all(o.view(np.uint32)[np.isnan(o)] == 0x7FC00000)
    assert np.all(g.dk.view(np.uint32)[np.isnan(g.dk)] == 0x7FC00000)


def test_hidden_keys_may_hold_anything():
    """Keys that a mask hides may be NaN; of tiles that causality or a window hides, nothing is read at all."""
    do, q, k, v = arrays((1, 1, 70, 16), (1, 1, 70, 16), (1, 1, 300, 16), (1, 1, 300, 16))
    mask = np.arange(300) < 100
    right = ig.attention(q, k, v, mask=mask)
    spoilt = k.copy()
    spoilt[:, :, 100:] = np.nan
    assert ig.attention(q, spoilt, v, mask=mask).tobytes() == right.tobytes()
    options = {"causal": True, "alignment": "upper_left"}
    right = everything(do, q, k, v, **options)
    spoilt, values = k.copy(), v.copy()
    spoilt[:, :, 128:], values[:, :, 128:] = np.nan, np.inf
    found = everything(do, q, spoilt, values, **options)
    for x, y in zip((*found[:2], *found[2][:3]), (*right[:2], *right[2][:3]), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_scores(shift):
    """Scores far from zero, all of them or in one tile only; exponentials neither overflow nor vanish."""
    do, q, k, v, bias = arrays(
        (1, 1, 5, 16), (1, 1, 5, 16), (1, 1, 300, 16), (1, 1, 300, 16), (5, 300), dtype=np.float64
    )
    for part in (slice(None), slice(130, 200), slice(250, None)):
        moved = bias.copy()
        moved[:, part] += shift
        o, lse, g = everything(do, q, k, v, bias=moved)
        inputs = reference.Inputs(bias=moved[None, None])
        exact, exact_lse = reference.oracle_attention(q, k, v, inputs=inputs)
        right = reference.oracle_attention_backward(do, q, k, v, inputs=inputs)
        assert np.allclose(o, exact, rtol=1e-9, atol=1e-12)
        assert np.allclose(lse, exact_lse, rtol=1e-14)
        assert np.allclose(g.dq, right.dq, rtol=1e-8, atol=1e-10)


def test_softcap_of_small_and_large_scores():
    """Tanh keeps its relative accuracy near 0 and its limit far away."""
    q, k = np.full((1, 1, 1, 16), 1.0, np.float32), np.zeros((1, 1, 40, 16), np.float32)
    k[0, 0, :, 0] = np.concatenate([10.0 ** np.arange(-30, 8), [-1e30, 0]])
    for cap in (0.5, 50.0):
        v = np.zeros((1, 1, 40, 40), np.float32)
        v[0, 0] = np.eye(40)
        o, lse = ig.attention(q, k, v, scale=1.0, softcap=cap, return_lse=True)
        scores = cap * np.tanh(k[0, 0, :, 0].astype(np.float64) / cap)
        right = np.exp(scores - lse[0, 0, 0])
        assert np.allclose(o[0, 0, 0], right, rtol=2e-5 if cap > 1 else 1e-6)
    small = np.float32(1e-3)
    k[...] = 0
    k[0, 0, 0, 0] = small
    _, lse = ig.attention(q, k[:, :, :1], v[:, :, :1], scale=1.0, softcap=1.0, return_lse=True)
    assert abs(float(lse[0, 0, 0]) - np.tanh(float(small))) < 2e-7 * float(small)


def test_share_that_dropout_drops():
    """Against the binomial distribution: five standard deviations, every row and column."""
    n, p = 512, 0.3
    options = ig.AttentionOptions(dropout_p=p, seed=99).validated("attention", 16)
    kept = reference.kept(options, 0, (2, 2, n, n))
    deviation = 5 * np.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < deviation / np.sqrt(kept.size)
    assert np.all(np.abs(kept.mean(axis=2) - (1 - p)) < deviation / np.sqrt(n))
    assert np.all(np.abs(kept.mean(axis=3) - (1 - p)) < deviation / np.sqrt(n))
    q = np.zeros((1, 1, n, 16), np.float32)
    o = ig.attention(q, q, np.ones_like(q), dropout_p=p, seed=99)
    assert np.allclose(o[0, 0, :, 0], kept[0, 0].mean(axis=1) / (1 - p), rtol=1e-5)


def test_tensors_of_torch_on_the_cpu():
    p = make(np.random.default_rng(0), "bias and mask", "float32")
    tensors = [torch.from_numpy(x.copy()) for x in (p.do, p.q, p.k, p.v)]
    options = {"bias": torch.from_numpy(p.inputs.bias.copy()), "mask": torch.from_numpy(p.inputs.mask.copy())}
    o, lse, g = everything(*tensors, **options)
    right = run(p)
    for found, expected in zip((o, lse, *g[:4]), (*right[:2], *right[2][:4]), strict=True):
        assert isinstance(found, torch.Tensor)
        assert found.numpy().tobytes() == expected.tobytes()
    half = [x.to(torch.bfloat16) for x in tensors]
    o, lse, g = everything(*half, mask=options["mask"])
    assert o.dtype == g.dq.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


def test_in_a_recording():
    p = make(np.random.default_rng(0), "causal", "float32", head_dim=16, v_dim=16)
    rows = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (p.q, p.k, p.v)]
    do = np.ascontiguousarray(p.do.transpose(0, 2, 1, 3))
    with ig.Encoder("cpu") as encoder:
        o, lse = ig.attention(*rows, causal=True, layout="BLHD", return_lse=True)
        g = ig.attention_backward(do, *rows, o, lse, causal=True, layout="BLHD")
    right = everything(do, *rows, causal=True, layout="BLHD")
    assert np.asarray(g.dq).tobytes() == right[2].dq.tobytes()
    rows[0][...] *= 2
    encoder.replay()
    assert np.asarray(o).tobytes() == ig.attention(*rows, causal=True, layout="BLHD").tobytes()


def test_what_the_plans_promise():
    found = {e.operation: e for e in registry.kernels() if e.device == "cpu" and e.operation.startswith("attention")}
    assert set(found) == {"attention", "attention_backward", "attention_delta", "attention_with_cache"}
    options = ig.AttentionOptions(causal=True)
    cache = ig.AttentionWithCacheDescriptor(1, 2, 1, 1, 8, 16, 16, "bfloat16", options)
    for operation, plan in (
        ("attention", ig.AttentionPlan.select(ig.AttentionDescriptor(1, 2, 1, 8, 8, 16, 16, "bfloat16"))),
        (
            "attention_backward",
            ig.AttentionBackwardPlan.select(ig.AttentionBackwardDescriptor(1, 2, 1, 8, 8, 16, 16, "bfloat16")),
        ),
        ("attention_delta", ig.AttentionDeltaPlan.select(ig.AttentionDeltaDescriptor(1, 2, 8, 16, "bfloat16"))),
        ("attention_with_cache", ig.AttentionWithCachePlan.select(cache)),
    ):
        promise = plan.precision_guarantee
        assert plan.sku.op == operation
        assert promise.deterministic
        assert promise.bit_stable_on_same_hardware
        assert promise.batch_invariant
        assert promise.order_invariant == promise.bit_stable_across_hardware == (operation == "attention_delta")


def test_a_row_that_sees_nothing_has_no_gradient_whatever_is_asked_of_it():
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((1, 2, 6, 16)).astype(np.float32) for _ in range(4))
    mask = np.ones((6, 6), np.bool_)
    mask[2] = False
    o, lse = ig.attention(q, k, v, mask=mask, return_lse=True)
    dlse = 2 * lse  # of a loss of lse squared: -inf there
    do[:, :, 2] = np.nan
    found = ig.attention_backward(do, q, k, v, o, lse, dlse=dlse, mask=mask)
    do[:, :, 2], dlse[:, :, 2] = 0, 0
    plain = ig.attention_backward(do, q, k, v, o, lse, dlse=dlse, mask=mask)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(plain, name)).all()
        assert getattr(found, name).tobytes() == getattr(plain, name).tobytes()
    assert not found.dq[:, :, 2].any()


def test_the_bound_covers_probabilities_that_underflow():
    q, k, v = (np.zeros((1, 1, n, 16), np.float32) for n in (1, 2, 2))
    v[0, 0, 1] = 1e30
    bias = np.array([[[[0, -101.7]]]], np.float32)
    o = ig.attention(q, k, v, bias=bias)
    exact, _ = reference.oracle_attention(q, k, v, inputs=reference.Inputs(bias=bias))
    bound, _ = error_bound("attention")(q=q, k=k, v=v, bias=bias)
    error = np.abs(o - exact).max()
    assert 2.0**-24 * np.abs(exact).max() < error <= bound.max()


def test_windows_wider_than_any_length_see_everything():
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 1, 6, 16)).astype(np.float32) for _ in range(3))
    whole = ig.attention(q, k, v)
    assert ig.attention(q, k, v, window=(2**63, 10**30)).tobytes() == whole.tobytes()
    assert reference.visible(AttentionOptions(window=(2**63, None)), 6, 6).all()


def test_an_oracle_whose_scaled_ds_would_overflow():
    rng = np.random.default_rng(11)
    do, q, k, v = (1e-4 * rng.standard_normal((1, 1, 5, 4)) for _ in range(4))
    options, dlse = AttentionOptions(scale=1e4), np.full((1, 1, 5), 1e307)
    found = reference.oracle_attention_backward(do, q, k, v, options, dlse=dlse)
    assert all(np.isfinite(x).all() for x in found[:3])
