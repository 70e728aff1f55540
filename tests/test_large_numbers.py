"""Integers beyond what arrays, operators and floats hold: a result, or an error that names the argument."""

import numpy as np
import pytest

import isograd as ig
from isograd import tape as tp
from isograd.numerics import random
from isograd.reduction import api as reduction

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype(np.float32)
I, T, ORDER = RNG.integers(0, 4, (4, 2)), RNG.integers(0, 4, 4), np.arange(4)  # noqa: E741
G, ONE = X[:, :2].copy(), np.ones((), np.float32)
Q = RNG.normal(size=(1, 1, 4, 16)).astype(np.float32)
V = ig.Tape().leaf(X)
# Integers of 64 bits and beyond, and some that no float holds.
NUMBERS = [sign * n for n in ((1 << 63) - 1, 1 << 63, 1 << 64, 1 << 70, 10**400) for sign in (1, -1)]

CALLS = {
    "axis": {
        "softmax": lambda n: ig.softmax(X, n),
        "softmax_backward": lambda n: ig.softmax_backward(X, X, n),
        "take_along_axis": lambda n: ig.take_along_axis(X, I, n),
        "take_along_axis_backward": lambda n: ig.take_along_axis_backward(G, I, (4, 6), n),
        "scatter_sum": lambda n: ig.scatter_sum(X, I, G, n),
        "cross_entropy": lambda n: ig.cross_entropy(X, T, axis=n),
        "gumbel_softmax": lambda n: ig.gumbel_softmax(X, axis=n, seed=0),
        "sparsemax": lambda n: ig.sparsemax(X, n),
        "top_k": lambda n: ig.top_k(X, 2, n),
        "renormalize": lambda n: ig.renormalize(X, n),
        "sum": lambda n: reduction.sum(X, n),
        "softmax of a variable": lambda n: ig.softmax(V, n),
        "top_k of a variable": lambda n: ig.top_k(V, 2, n),
        "concatenate": lambda n: tp.concatenate([V, V], n),
    },
    "": {  # results of other names and sizes
        "take_along_axis_backward": lambda n: ig.take_along_axis_backward(G, I, (4, n)),
        "load_balancing_loss_backward": lambda n: ig.load_balancing_loss_backward(ONE, I, (4, n)),
        "segment_sum": lambda n: ig.segment_sum(X, T, n),
        "embedding_backward": lambda n: ig.embedding_backward(X, T, n),
        "moe_permute": lambda n: ig.moe_permute(G, ORDER, n),
        "moe_permute_backward": lambda n: ig.moe_permute_backward(G, ORDER, n),
        "linear_cross_entropy": lambda n: ig.linear_cross_entropy(X, X, T, chunk=n),
        "linear_cross_entropy_gradient": lambda n: ig.linear_cross_entropy(
            X, X, T, chunk=n, return_gradient=True, preference="order_free"
        ),
        "attention": lambda n: ig.attention(Q, Q, Q, window=(n, n)),
        "reshape": lambda n: V.reshape(4, n),
        "getitem": lambda n: V[n],
        "slices": lambda n: V[n::n],
        "an operand": lambda n: V + n,
    },
    "k": {"top_k": lambda n: ig.top_k(X, n), "moe_router": lambda n: ig.moe_router(X, n)},
    "groups": {"moe_router": lambda n: ig.moe_router(X, 2, groups=n)},
    "group_k": {"moe_router": lambda n: ig.moe_router(X, 2, groups=3, group_k=n)},
    "num_experts": {
        "expert_counts": lambda n: ig.expert_counts(I, n),
        "expert_permutation": lambda n: ig.expert_permutation(I, n),
        "load_balancing_loss": lambda n: ig.load_balancing_loss(X, I, n),
    },
    "padding_idx": {
        "embedding": lambda n: ig.embedding(X, T, n),
        "embedding_backward": lambda n: ig.embedding_backward(X, T, 5, n),
    },
    "ignore_index": {
        "cross_entropy": lambda n: ig.cross_entropy(X, T, ignore_index=n),
        "linear_cross_entropy": lambda n: ig.linear_cross_entropy(X, X, T, ignore_index=n),
        "cross_entropy of a variable": lambda n: ig.cross_entropy(V, T, ignore_index=n),
    },
    "seed": {
        "gumbel_softmax": lambda n: ig.gumbel_softmax(X, seed=n),
        "dropout": lambda n: ig.dropout(X, seed=n),
        "attention": lambda n: ig.attention(Q, Q, Q, dropout_p=0.5, seed=n),
        "random": lambda n: random.normal(3, n),
    },
    "offset": {
        "gumbel_softmax": lambda n: ig.gumbel_softmax(X, seed=0, offset=n),
        "dropout": lambda n: ig.dropout(X, seed=0, offset=n),
    },
    "count": {
        "cross_entropy": lambda n: ig.cross_entropy(X, T, count=n),
        "linear_cross_entropy": lambda n: ig.linear_cross_entropy(X, X, T, count=n),
        "LossAccumulator": lambda n: ig.LossAccumulator().mean(n),
    },
    "dloss": {"cross_entropy_backward": lambda n: ig.cross_entropy_backward(n, X, T)},
    "label_smoothing": {
        "cross_entropy": lambda n: ig.cross_entropy(X, T, label_smoothing=n),
        "linear_cross_entropy": lambda n: ig.linear_cross_entropy(X, X, T, label_smoothing=n),
    },
    "z_loss": {
        "cross_entropy": lambda n: ig.cross_entropy(X, T, z_loss=n),
        "linear_cross_entropy": lambda n: ig.linear_cross_entropy(X, X, T, z_loss=n),
    },
    "temperature": {
        "distillation_loss": lambda n: ig.distillation_loss(X, X, n),
        "distillation_loss_backward": lambda n: ig.distillation_loss_backward(ONE, X, X, n),
    },
    "tau": {
        "gumbel_softmax": lambda n: ig.gumbel_softmax(X, n, seed=0),
        "gumbel_softmax_backward": lambda n: ig.gumbel_softmax_backward(X, X, n),
    },
    "softcap": {"softcap of attention": lambda n: ig.attention(Q, Q, Q, softcap=n)},
    "dropout_p": {"dropout_p of attention": lambda n: ig.attention(Q, Q, Q, dropout_p=n, seed=0)},
    "scale": {
        "attention": lambda n: ig.attention(Q, Q, Q, scale=n),
        "moe_router": lambda n: ig.moe_router(X, 2, scale=n),
    },
}


@pytest.mark.parametrize(("argument", "name"), [(argument, name) for argument in CALLS for name in CALLS[argument]])
def test_large_numbers(argument, name):
    errors = []
    for number in NUMBERS:
        try:
            CALLS[argument][name](number)
        except ig.IsogradError as error:
            errors.append(str(error))
    assert argument == "ignore_index" or name in ("attention", "slices", "linear_cross_entropy") or errors
    assert all(argument in error for error in errors)


def operators():
    torch = pytest.importorskip("torch", reason="needs torch")
    from isograd import torch as igt

    x, i, t, g, order, q = (torch.tensor(a) for a in (X, I, T, G, ORDER, Q))
    return {
        "dim": (
            lambda n: igt.softmax(x, n), lambda n: igt.gather(x, n, i), lambda n: igt.take_along_dim(x, i, n),
            lambda n: igt.scatter_add(x, n, i, g), lambda n: igt.index_add(x, n, t, x),
            lambda n: igt.index_select(x, n, t), lambda n: igt.topk(x, 2, n), lambda n: igt.sparsemax(x, n),
            lambda n: igt.gumbel_softmax(x, dim=n, seed=0),
        ),
        "k": (
            lambda n: igt.topk(x, n), lambda n: igt.moe_router(x, n),
        ),
        "groups": (lambda n: igt.moe_router(x, 2, groups=n),),
        "group_k": (lambda n: igt.moe_router(x, 2, groups=3, group_k=n),),
        "num_experts": (
            lambda n: igt.expert_counts(i, n), lambda n: igt.expert_permutation(i, n),
            lambda n: igt.load_balancing_loss(x, i, n), lambda n: ig.expert_counts(i, n),
        ),
        "padding_idx": (lambda n: igt.embedding(t, x, n),),
        "ignore_index": (
            lambda n: igt.cross_entropy(x, t, ignore_index=n),
            lambda n: igt.linear_cross_entropy(x, x, t, ignore_index=n),
        ),
        "seed": (lambda n: igt.gumbel_softmax(x, seed=n),),
        "chunk": (lambda n: igt.linear_cross_entropy(x, x, t, chunk=n),),
        "count": (lambda n: igt.cross_entropy(x, t, count=n),),
        "scale": (
            lambda n: igt.moe_router(x, 2, scale=n), lambda n: igt.attention(q, q, q, scale=n),
            lambda n: igt.scaled_dot_product_attention(q, q, q, scale=n),
        ),
        "alpha": (lambda n: igt.index_add(x, 0, t, x, alpha=n),),
        "label_smoothing": (
            lambda n: igt.cross_entropy(x, t, label_smoothing=n),
            lambda n: igt.linear_cross_entropy(x, x, t, label_smoothing=n),
        ),
        "z_loss": (
            lambda n: igt.cross_entropy(x, t, z_loss=n), lambda n: igt.linear_cross_entropy(x, x, t, z_loss=n),
        ),
        "temperature": (lambda n: igt.distillation_loss(x, x, n),),
        "tau": (lambda n: igt.gumbel_softmax(x, n, seed=0),),
        "softcap": (lambda n: igt.attention(q, q, q, softcap=n),),
        "dropout_p": (
            lambda n: igt.attention(q, q, q, dropout_p=n, seed=0),
            lambda n: igt.scaled_dot_product_attention(q, q, q, dropout_p=n),
        ),
        "": (
            lambda n: ig.segment_sum(x, t, n), lambda n: ig.moe_permute(g, order, n),
            lambda n: igt.moe_permute(g, order, n),
        ),
    }  # fmt: skip


def test_large_numbers_for_operators():
    for argument, calls in operators().items():
        for call in calls:
            errors = []
            for number in NUMBERS:
                try:
                    call(number)
                except ig.IsogradError as error:
                    errors.append(str(error))
            assert errors
            assert [error for error in errors if argument not in error] == []
