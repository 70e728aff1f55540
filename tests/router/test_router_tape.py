"""The router family on the tape: gradients against finite differences, and a mixture of experts from end to end."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
import isograd.tape as tp
from isograd.ops.router import reference

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((5, 8))
EXPERTS = reference.top_k(LOGITS, 3)[1]
ORDER = reference.expert_permutation(EXPERTS, 8)[0]


def routed(**options):
    return lambda x: tp.moe_router(x, 3, **options)[0]


CASES = {
    "top_k": (lambda x: tp.top_k(x, 3)[0], [LOGITS]),
    "top_k axis": (lambda x: tp.top_k(x, 2, 0)[0], [LOGITS]),
    "renormalize": (lambda w: tp.renormalize(w), [np.abs(LOGITS) + 0.1]),
    "renormalize axis": (lambda w: tp.renormalize(w, axis=0), [np.abs(LOGITS) + 0.1]),
    "softmax router": (routed(), [LOGITS]),
    "softmax router, renormalized": (routed(renormalize=True, scale=2.5), [LOGITS]),
    "sigmoid router": (routed(scoring="sigmoid"), [LOGITS]),
    "sigmoid router, renormalized": (
        routed(scoring="sigmoid", renormalize=True, bias=LOGITS[0] / 9, groups=4, group_k=2),
        [LOGITS],
    ),
    "moe_permute": (lambda x: tp.moe_permute(x, ORDER, 3), [RNG.standard_normal((5, 4))]),
    "moe_combine": (
        lambda o, w: tp.moe_combine(o, w, ORDER),
        [RNG.standard_normal((15, 4)), np.abs(RNG.standard_normal((5, 3)))],
    ),
    "load_balancing_loss": (lambda p: tp.load_balancing_loss(p, EXPERTS), [np.abs(LOGITS)]),
    "router_z_loss": (lambda x: tp.router_z_loss(x), [LOGITS]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_gradients_against_finite_differences(name):
    function, operands = CASES[name]
    tape = ig.Tape()
    leaves = [tape.leaf(x) for x in operands]
    y = function(*leaves)
    upstream = np.random.default_rng(1).standard_normal(y.shape)
    gradients = tape.backward(y, upstream)

    def loss(*arrays):
        other = ig.Tape()
        return float((function(*map(other.leaf, arrays)).value * upstream).sum())

    step = 1e-6
    for position, (leaf, x) in enumerate(zip(leaves, operands, strict=True)):
        for index in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = [np.array(a) for a in operands]
                moved[position][index] += sign * step
                ends.append(loss(*moved))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(gradients[leaf][index] - slope) < 1e-7 * max(1, abs(slope)), (position, index)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_bits_of_the_gradients(dtype):
    x = RNG.standard_normal((6, 8)).astype(dtype)
    tape = ig.Tape()
    leaf = tape.leaf(x)
    weights, experts = tp.moe_router(leaf, 2, renormalize=True)
    g = RNG.standard_normal((6, 2)).astype(weights.dtype)
    expected = reference.moe_router_backward(g, x, experts, renormalize=True)
    assert tape.backward(weights, g)[leaf].tobytes() == expected.tobytes()
    values, indices = tp.top_k(leaf, 3)
    g = RNG.standard_normal((6, 3)).astype(dtype)
    g[0, 0] = -0.0
    assert tape.backward(values, g)[leaf].tobytes() == reference.top_k_backward(g, indices, x.shape).tobytes()


def mixture(x, gates, matrices, dtype):
    """Tokens through two of four experts, weights in the work type; everything on a tape."""
    tape = ig.Tape()
    x, gates = tape.leaf(x.astype(dtype)), tape.leaf(gates.astype(dtype))
    matrices = [tape.leaf(m.astype(dtype)) for m in matrices]
    logits = x @ gates
    weights, experts = ig.moe_router(logits, 2, renormalize=True)
    order, offsets = ig.expert_permutation(experts, 4)
    rows = ig.moe_permute(x, order, 2)
    parts = [rows[offsets[e] : offsets[e + 1]] @ m for e, m in enumerate(matrices)]
    y = ig.moe_combine(tp.concatenate(parts), weights, order)
    balance = ig.load_balancing_loss(ig.softmax(logits), experts, 4)
    z = ig.router_z_loss(logits)
    return tape, [x, gates, *matrices], y, balance, z


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_mixture_of_experts_in_narrow_types(dtype):
    rng = np.random.default_rng(2)
    data = rng.standard_normal((12, 6)), rng.standard_normal((6, 4)), rng.standard_normal((4, 6, 5))
    tape, leaves, y, balance, z = mixture(*data, dtype)
    assert (y.dtype, y.shape) == (np.dtype(dtype), (12, 5))
    assert balance.dtype == z.dtype == np.float32
    for loss in (y.sum(), balance, z):
        gradients = tape.backward(loss)
        assert all(gradients[leaf].dtype == np.dtype(dtype) for leaf in leaves)
        assert any(np.any(gradients[leaf].astype(float) != 0) for leaf in leaves)
    _, _, wide, *_ = mixture(*data, np.float64)
    assert np.abs(y.value.astype(float) - wide.value).max() < 0.2


def test_errors_of_variables():
    tape = ig.Tape()
    x = tape.leaf(LOGITS)
    with pytest.raises(ig.InvalidProblemError, match="k is 9"):
        tp.top_k(x, 9)
    with pytest.raises(ig.IndexOutOfRangeError, match="experts"):
        ig.load_balancing_loss(x, EXPERTS + 8)
    half = tape.leaf(RNG.standard_normal((15, 4)).astype(np.float16))
    with pytest.raises(ig.InvalidProblemError, match="weights has dtype float16"):
        ig.moe_combine(half, tape.leaf(np.ones((5, 3), np.float16)), ORDER)


def test_indices_that_change_later_do_no_harm():
    tape = ig.Tape()
    x = tape.leaf(RNG.standard_normal((5, 4)).astype(np.float32))
    order = ORDER.copy()
    y = ig.moe_permute(x, order, 3)
    expected = tape.backward(y.sum())[x]
    order[:] = 0
    assert tape.backward(y.sum())[x].tobytes() == expected.tobytes()
