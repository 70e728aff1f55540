"""The definition of order-free attention: its errors beside a flash kernel's, what leaves no trace, special values."""

import ml_dtypes
import numpy as np
import pytest
from attention_problems import FLAVOURS, make

from isograd.flash_attention import reference as dense
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import reference
from isograd.flash_attention.reference import Inputs

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def wide(x):
    return np.asarray(x, np.float64)


def values(name, rng, q_length, k_length, size):
    """q, k, v and do of one head."""
    q, k, v, do = (rng.standard_normal((n, size)) for n in (q_length, k_length, k_length, q_length))
    match name:
        case "diffuse":
            q *= 0.1
        case "sharp":
            q *= 4
        case "channel outliers":
            k[:, rng.choice(size, 4, False)] *= 20
        case "logits of 45":
            q *= 45 / np.abs(q @ k.T / np.sqrt(size)).max()
        case "lognormal do":
            do *= np.exp(2 * rng.standard_normal((q_length, 1)))
        case "lognormal v":
            v *= np.exp(2 * rng.standard_normal((k_length, 1)))
        case "sink":
            u = rng.standard_normal(size)
            u /= np.linalg.norm(u)
            q += 8 * u
            k[0], v[0] = u * 1.5 * np.sqrt(size), v[0] * 0.01
    return [x.astype(BFLOAT16)[None, None] for x in (q, k, v, do)]


DATA = (
    "plain",
    "diffuse",
    "sharp",
    "channel outliers",
    "logits of 45",
    "gradients lognormal",
    "values lognormal",
    "sink",
)


def stored(x):
    return wide(x.astype(BFLOAT16))


def flash(q, k, v, do, narrow):
    """(o, dq, dk, dv) in binary64, where P and dS pass through `narrow`."""
    q, k, v, do = (wide(x)[0, 0] for x in (q, k, v, do))
    scale = 1 / np.sqrt(q.shape[1])
    s = scale * q @ k.T
    e = np.exp(s - s.max(axis=1, keepdims=True))
    total = e.sum(axis=1, keepdims=True)
    o, p = narrow(e) @ v / total, e / total
    ds = p * (do @ v.T - (stored(o) * do).sum(axis=1, keepdims=True))
    return o, scale * narrow(ds) @ k, scale * narrow(ds).T @ q, narrow(p).T @ do


@pytest.mark.parametrize("name", DATA)
def test_errors_beside_a_flash_kernel(name):
    q, k, v, do = values(name, np.random.default_rng(5), 256, 1024, 128)
    exact, rounded = flash(q, k, v, do, lambda x: x), flash(q, k, v, do, stored)
    o, lse = reference.attention(q, k, v)
    gradients = reference.attention_backward(do, q, k, v, o, lse)
    for mine, other, right in zip((o, *gradients[:3]), rounded, exact, strict=True):
        mine, other = wide(mine)[0, 0] - right, stored(other) - right
        assert np.sqrt(np.mean(mine**2)) <= np.sqrt(np.mean(other**2))
        assert np.abs(mine).max() <= 1.5 * np.abs(other).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("flavour", list(FLAVOURS))
def test_options_mean_what_they_mean(flavour, dtype):
    p = make(np.random.default_rng(3), flavour, dtype)
    o, lse = reference.attention(p.q, p.k, p.v, p.options, p.inputs)
    exact_o, exact_lse = dense.oracle_attention(p.q, p.k, p.v, p.options, p.inputs)
    found = reference.attention_backward(p.do, p.q, p.k, p.v, o, lse, p.options, p.inputs, p.dlse)
    right = dense.oracle_attention_backward(p.do, p.q, p.k, p.v, p.options, p.inputs, p.dlse, o, lse)
    unit = {"bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype]
    assert np.array_equal(np.isneginf(lse), np.isneginf(exact_lse))
    seeing = np.isfinite(exact_lse)
    assert np.allclose(lse[seeing], exact_lse[seeing], 0, 2.0**-12)
    for mine, exact in ((o, exact_o), *zip(found[:3], right[:3], strict=True)):
        assert mine.dtype == p.q.dtype
        assert np.sqrt(np.mean((wide(mine) - exact) ** 2)) <= 1.5 * unit * np.sqrt(np.mean(exact**2))
    if right.dsinks is not None:
        assert np.allclose(wide(found.dsinks), right.dsinks, 4 * unit, 2.0**-10)


def test_one_key_of_all_the_weight_is_not_clipped():
    q, k, v, do = values("plain", np.random.default_rng(7), 128, 256, 64)
    k[0, 0] *= 0.01
    k[0, 0, 9] = q[0, 0, 3] * 40  # query 3 sees key 9 alone
    o, lse = reference.attention(q, k, v)
    assert np.abs(wide(o[0, 0, 3]) - wide(v[0, 0, 9])).max() <= 2.0**-15 * np.abs(wide(v[0, 0, 9])).max()
    alone = np.zeros_like(do)
    alone[0, 0, 3] = do[0, 0, 3]
    gradients = reference.attention_backward(alone, q, k, v, o, lse)
    mine, right = wide(gradients.dv[0, 0, 9]), wide(do[0, 0, 3])
    assert np.abs(mine - right).max() <= 2.0**-15 * np.abs(right).max()


@pytest.mark.parametrize("options", [AttentionOptions(causal=True), AttentionOptions(causal=True, window=(150, 0))])
def test_a_row_of_the_prefix_is_the_row_of_a_decoding_step(options):
    q, k, v, _ = values("sink", np.random.default_rng(8), 400, 400, 64)
    sinks = np.array([0.5], np.float32)
    o, lse = reference.attention(q, k, v, options, Inputs(sinks=sinks))
    for i in (0, 1, 127, 128, 200, 399):
        seen = slice(0, i + 1)
        row, sums = reference.attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], options, Inputs(sinks=sinks))
        assert np.array_equal(row[0, 0, 0].view(np.uint16), o[0, 0, i].view(np.uint16))
        assert sums[0, 0, 0] == lse[0, 0, i]


def test_order_within_a_block_leaves_no_trace():
    q, k, v, do = values("sharp", np.random.default_rng(9), 256, 256, 64)
    o, lse = reference.attention(q, k, v)
    before = reference.attention_backward(do, q, k, v, o, lse)
    rng = np.random.default_rng(10)
    order = np.concatenate([rng.permutation(128), 128 + rng.permutation(128)])
    mixed = [x[:, :, order] for x in (k, v)]
    other, sums = reference.attention(q, *mixed)
    assert np.array_equal(other.view(np.uint16), o.view(np.uint16))
    assert np.array_equal(sums, lse)
    after = reference.attention_backward(do, q, *mixed, o, lse)
    assert np.array_equal(after.dq.view(np.uint16), before.dq.view(np.uint16))
    for mine, expected in zip(after[1:3], before[1:3], strict=True):
        assert np.array_equal(mine.view(np.uint16), expected[:, :, order].view(np.uint16))
    mixed = [x[:, :, order] for x in (do, q)]
    after = reference.attention_backward(mixed[0], mixed[1], k, v, o[:, :, order], lse[:, :, order])
    for mine, expected in zip(after[1:3], before[1:3], strict=True):
        assert np.array_equal(mine.view(np.uint16), expected.view(np.uint16))


def test_what_is_not_finite_reaches_the_rows_that_see_it():
    q, k, v, do = values("plain", np.random.default_rng(11), 40, 40, 16)
    options = AttentionOptions(causal=True)
    k[0, 0, 20, 3], v[0, 0, 30, 1], q[0, 0, 5, 0], do[0, 0, 7, 2] = np.inf, np.nan, -np.inf, np.nan
    o, lse = reference.attention(q, k, v, options)
    bad = (np.arange(40) == 5) | (np.arange(40) >= 20)
    assert np.array_equal(np.isnan(lse[0, 0]), bad)
    assert np.array_equal(np.isnan(o[0, 0]), np.repeat(bad[:, None], 16, 1))
    gradients = reference.attention_backward(do, q, k, v, o, lse, options)
    assert np.array_equal(np.isnan(gradients.dq[0, 0]).all(axis=1), bad | (np.arange(40) == 7))
    assert np.isnan(wide(gradients.dk)).all()  # the last row sees every key
    bounded = reference.attention_backward(do[:, :, :20], *(x[:, :, :20] for x in (q, k, v, o, lse)), options)
    for mine in bounded[1:3]:
        assert np.array_equal(np.isnan(mine[0, 0]).any(axis=1), np.arange(20) <= 7)


def test_scores_far_beyond_any_model_have_finite_results():
    rng = np.random.default_rng(12)
    q, k, v, do = values("plain", rng, 8, 300, 16)
    q = (wide(q) * 1e9).astype(BFLOAT16)
    o, lse = reference.attention(q, k, v)
    assert np.isfinite(wide(o)).all()
    assert np.isfinite(lse).all()
    assert all(np.isfinite(wide(x)).all() for x in reference.attention_backward(do, q, k, v, o, lse)[:3])
    bias = np.full((1, 1, 1, 300), np.finfo(np.float32).min, np.float32)
    o, _ = reference.attention(q[..., :1, :] * BFLOAT16.type(1e-9), k, v, None, Inputs(bias=bias))
    assert np.allclose(wide(o)[0, 0, 0], wide(v).mean(axis=2)[0, 0], atol=2e-3)
