"""Gradients in float64: the kernels against the oracle, the oracle against finite differences, lse included."""

import ml_dtypes
import numpy as np
import pytest
from attention_problems import FLAVOURS, bounds, exact, exact_backward, make, run
from choices import thinned

import isograd as ig
from isograd.flash_attention import reference


def total(p, arrays, names):
    """<do, o> + <dlse, lse> with some operands replaced."""
    replaced = dict(zip(names, arrays, strict=True))
    rows = {name: replaced.pop(name) for name in ("q", "k", "v")}
    o, lse = reference.oracle_attention(**rows, options=p.options, inputs=p.inputs._replace(**replaced))
    return np.sum(o * p.do) + np.sum(np.where(lse == -np.inf, 0, lse) * p.dlse)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_finite_differences(flavour):
    rng = np.random.default_rng(3)
    p = make(rng, flavour, "float64", q_length=13, k_length=19)
    names = ["q", "k", "v", *(name for name in ("bias", "sinks") if getattr(p.inputs, name) is not None)]
    values = [getattr(p, name) if name in ("q", "k", "v") else getattr(p.inputs, name) for name in names]
    gradients = run(p, dlse=True)[2]
    for which, (name, x) in enumerate(zip(names, values, strict=True)):
        direction, step = rng.standard_normal(x.shape), 1e-5
        ends = []
        for sign in (1, -1):
            moved = [y + sign * step * direction if i == which else y for i, y in enumerate(values)]
            ends.append(total(p, moved, names))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert np.sum(getattr(gradients, f"d{name}") * direction) == pytest.approx(slope, rel=2e-7, abs=2e-7), name


@pytest.mark.parametrize(("dtype", "flavour"), thinned(3, ["float64", "float32", "bfloat16"], FLAVOURS))
def test_within_the_bound(flavour, dtype):
    p = make(np.random.default_rng(4), flavour, dtype, q_length=100, k_length=90, head_dim=72, v_dim=40)
    o, lse, gradients = run(p, dlse=True)
    exact_o, exact_lse, _ = exact(p)
    (of_o, of_lse), of = bounds(p, o, lse, dlse=True)
    seen = np.isfinite(exact_lse)
    assert np.array_equal(np.isfinite(lse), seen)
    assert np.all(np.abs(o.astype(np.float64) - exact_o) <= of_o)
    assert np.all(np.abs(lse[seen] - exact_lse[seen]) <= of_lse[seen])
    right = exact_backward(p, o, lse, dlse=True)
    for name, bound in of.items():
        assert np.all(np.abs(getattr(gradients, name).astype(np.float64) - getattr(right, name)) <= bound), name
        # A bound that would hide a wrong sign or a missing term is none; sums over a whole bias have many terms.
        if dtype != "bfloat16" and name != "dbias":
            assert np.max(bound) < 1e-2 * np.max(np.abs(getattr(right, name)), initial=0) + 1e-2, name


def test_gradients_can_be_left_out():
    p = make(np.random.default_rng(5), "bias", "float32")
    o, lse, gradients = run(p)
    some = ig.attention_backward(p.do, p.q, p.k, p.v, o, lse, bias_gradient=False, **p.arguments)
    assert some.dbias is None
    assert some.dsinks is None
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(some, name), getattr(gradients, name))


@pytest.mark.parametrize("shape", [(150,), (70, 1), (1, 1), (4, 1, 150), (2, 1, 70, 150)])
def test_bias_of_fewer_axes(shape):
    rng = np.random.default_rng(6)
    p = make(rng, "plain", "float64")
    bias = rng.standard_normal(shape)
    o, lse = ig.attention(p.q, p.k, p.v, bias=bias, return_lse=True)
    full = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    inputs = reference.Inputs(bias=full)
    assert np.allclose(o, reference.oracle_attention(p.q, p.k, p.v, p.options, inputs)[0], rtol=1e-12, atol=1e-13)
    dbias = ig.attention_backward(p.do, p.q, p.k, p.v, o, lse, bias=bias).dbias
    right = reference.oracle_attention_backward(p.do, p.q, p.k, p.v, p.options, inputs).dbias
    assert dbias.shape == shape
    assert np.allclose(dbias, right.reshape(shape), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bias_and_sinks_in_float32(dtype):
    p = make(np.random.default_rng(7), "softcap and sinks", dtype)
    bias = np.random.default_rng(8).standard_normal((2, 4, 1, 150)).astype(np.float32)
    p = p._replace(inputs=p.inputs._replace(bias=bias, sinks=p.inputs.sinks.astype(np.float32)))
    o, lse, gradients = run(p)
    assert gradients.dbias.dtype == gradients.dsinks.dtype == np.float32
    right = exact_backward(p, o, lse)
    assert np.allclose(gradients.dbias, right.dbias, rtol=1e-4, atol=1e-5)
    assert np.allclose(gradients.dsinks, right.dsinks, rtol=1e-4, atol=1e-5)
    assert o.dtype.name == dtype


def test_lse_alone():
    """A loss of lse alone has no gradient of v, and softmax-weighted keys as the gradient of q."""
    p = make(np.random.default_rng(9), "causal", "float64")
    p = p._replace(do=np.zeros_like(p.do))
    gradients, right = run(p, dlse=True)[2], exact(p, dlse=True)[2]
    assert not np.any(gradients.dv)
    assert np.allclose(gradients.dq, right.dq, rtol=1e-10, atol=1e-12)
    assert np.allclose(gradients.dk, right.dk, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_delta_has_the_bits_of_the_contract(dtype):
    rng = np.random.default_rng(10)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    o, do = (rng.standard_normal((2, 3, 17, 40)).astype(kind) for _ in range(2))
    o[0, 0, 3, 5], do[1, 2, 4, 0], do[1, 2, 4, 1] = np.inf, np.nan, -np.inf
    right = reference.attention_delta(o, do)
    assert ig.attention_delta(o, do).tobytes() == right.tobytes()
    wide = np.zeros((2, 3, 17, 96), kind)
    wide[..., ::2][..., :40] = do
    assert ig.attention_delta(o, wide[..., ::2][..., :40]).tobytes() == right.tobytes()
    swapped = ig.attention_delta(o.transpose(0, 2, 1, 3), do.transpose(0, 2, 1, 3), layout="BLHD")
    assert swapped.tobytes() == right.tobytes()
