"""Attention against the oracle by FlashAttention's rule: no further off than twice a plain computation's error."""

import itertools

import numpy as np
import pytest
from attention_problems import DIMS, FLAVOURS, HEADS, LENGTHS, bounds, exact, exact_backward, make, plain, run

VANISHING, FEW_KEYS = 1e-10, 2
DTYPES = ("float32", "bfloat16", "float16")


def largest(x, exact):
    return float(np.max(np.abs(np.asarray(x, np.float64) - exact), initial=0))


def noise(exact, dtype, lse=None):
    """What rounding alone makes of a result: that of the result, and of lse, which float32 gradients start from.

    A plain computation keeps its probabilities. Here they are exp(s - lse), where the roundings of lse and of the
    difference are errors of half an ulp of lse each.
    """
    relative = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    if lse is not None:
        finite = np.abs(lse[np.isfinite(lse)])
        relative += float(np.spacing(np.max(finite, initial=0).astype(np.float32)))
    return relative * float(np.max(np.abs(exact), initial=0))


def check_rule(p, dtype, times):
    o, lse, gradients = run(p)
    exact_o, exact_lse, exact_gradients = exact(p)
    plain_o, plain_gradients = plain(p)
    assert largest(o, exact_o) <= times * largest(plain_o, exact_o) + noise(exact_o, dtype)
    assert o.dtype == p.q.dtype
    assert np.array_equal(np.isfinite(lse), np.isfinite(exact_lse))
    for name, mine in plain_gradients.items():
        got, right = getattr(gradients, name), getattr(exact_gradients, name)
        assert got.dtype == p.q.dtype
        if np.max(np.abs(right), initial=0) < VANISHING or (name != "dv" and p.k.shape[2] <= FEW_KEYS):
            # dS is 0 with one key and in a sum over all keys, and with two keys little is left of dP - D, whose D is
            # made from the rounded o; a plain computation takes D from the same dP. The promised bound has to hold.
            right = getattr(exact_backward(p, o, lse), name)
            assert np.all(np.abs(got.astype(np.float64) - right) <= bounds(p, o, lse)[1][name])
            continue
        assert largest(got, right) <= times * largest(mine, right) + noise(right, dtype, exact_lse), name


def times_of(flavour):
    return 3 if "softcap" in FLAVOURS[flavour] else 2


def sampled():
    """Every length, dimension, number of heads, option and dtype, in combinations that go round them at once."""
    pairs = [(q, k) for q, k in itertools.product(LENGTHS, LENGTHS) if q * k <= 256 * 1024]
    flavours = list(FLAVOURS)
    for n, flavour in enumerate(flavours * 3):
        q_length, k_length = pairs[(37 * n + 5) % len(pairs)]
        heads = HEADS[n % len(HEADS)] if q_length * k_length <= 128 * 128 else (1, 1)
        yield flavour, q_length, k_length, DIMS[n % 8], DIMS[(n // 3) % 8], heads, DTYPES[n // len(flavours)]
    for n, length in enumerate(LENGTHS):
        yield "plain", length, LENGTHS[-1 - n], DIMS[n % 8], DIMS[-1 - n % 8], (1, 1), "float32"
    yield "causal", 2048, 2048, 64, 64, (1, 1), "float32"


@pytest.mark.parametrize("case", list(sampled()), ids=lambda case: "-".join(map(str, case)))
def test_flash_attention_rule(case):
    flavour, q_length, k_length, head_dim, v_dim, heads, dtype = case
    batch = 2 if q_length * k_length <= 128 * 256 else 1
    p = make(np.random.default_rng(1), flavour, dtype, batch, heads, q_length, k_length, head_dim, v_dim)
    check_rule(p, dtype, times_of(flavour))


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", list(itertools.product(LENGTHS, LENGTHS)))
def test_flash_attention_rule_everywhere(lengths):
    rng = np.random.default_rng(2)
    for n, flavour in enumerate(FLAVOURS):
        p = make(rng, flavour, DTYPES[n % 3], 1, HEADS[n % 5], *lengths, DIMS[n % 8], DIMS[n // 8 % 8])
        check_rule(p, DTYPES[n % 3], times_of(flavour))
    for heads, (head_dim, v_dim) in itertools.product(HEADS, [(d, d) for d in DIMS]):
        check_rule(make(rng, "causal", "float32", 1, heads, *lengths, head_dim, v_dim), "float32", 2)
