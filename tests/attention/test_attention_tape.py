"""Attention on the tape: gradients of o and lse together, constants, checkpoints."""

import numpy as np
import pytest
from attention_problems import FLAVOURS, exact, make

import isograd as ig


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_gradients(flavour):
    p = make(np.random.default_rng(0), flavour, "float64")
    tape = ig.Tape()
    leaves = {name: tape.leaf(getattr(p, name)) for name in ("q", "k", "v")}
    leaves |= {n: tape.leaf(x) for n in ("bias", "sinks") if (x := getattr(p.inputs, n)) is not None}
    o, lse = ig.attention(**{**p.arguments, **leaves}, return_lse=True)
    # lse is -inf in rows that see nothing, and a gradient of it would have no meaning there.
    with_lse = bool(np.all(np.isfinite(lse.value)))
    loss = (o * p.do).sum() + (lse * p.dlse).sum() if with_lse else (o * p.do).sum()
    gradients = tape.backward(loss)
    right = exact(p, dlse=with_lse)[2]
    for name, leaf in leaves.items():
        assert np.allclose(gradients[leaf], getattr(right, f"d{name}"), rtol=1e-9, atol=1e-11), name


def test_constants_are_copied():
    p = make(np.random.default_rng(1), "mask", "float64")
    tape = ig.Tape()
    q, k, mask = tape.leaf(p.q), p.k.copy(), p.inputs.mask.copy()
    o = ig.attention(q, k, p.v, **{**p.arguments, "mask": mask})
    k[...], mask[...] = 0, False
    assert np.allclose(tape.backward(o, p.do)[q], exact(p)[2].dq, rtol=1e-9, atol=1e-11)


def test_through_a_checkpoint_with_the_same_bits():
    p = make(np.random.default_rng(2), "dropout", "float32")

    def layer(q):
        return ig.attention(q, p.k, p.v, **p.arguments)

    found = []
    for whole in (False, True):
        tape = ig.Tape()
        q = tape.leaf(p.q)
        o = tape.checkpoint(layer, q) if whole else layer(q)
        found.append(tape.backward(o, p.do)[q].tobytes())
    assert found[0] == found[1]
