"""What is special about layernorm: torch's spelling, the bounds under attack, and gradients of weight and bias."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops.layernorm.operation import LAYERNORM, LAYERNORM_BACKWARD

TYPES = ["float16", "float32", "float64"]


def attacks(dtype):
    """(rows, gradients, weight, bias, eps) that make roundings large beside the results."""
    rng = np.random.default_rng(5)
    top = {"float16": 2.0**7, "float64": 2.0**490}.get(dtype, 2.0**55)
    for n in (1, 2, 3, 17, 700, 6000):
        x, dy = rng.standard_normal((20, n)), rng.standard_normal((20, n))
        w, b = rng.standard_normal(n), rng.standard_normal(n)
        yield x, dy, w, b, 1e-5
        yield np.abs(x) * top, dy, w / top, b, 0.0
        yield x / top, dy, w, b / 64, 1e-6
        yield x * np.exp2(rng.uniform(-20, 7, (20, n))), dy, w, b, 1e-5
        yield 1000 + x, dy, w, -w, 1e-5  # the mean's rounding counts
        yield 0.1 + np.zeros((20, n)), dy, w, b, 1e-30
        yield 3 + 1e-3 * x, 1 + 1e-4 * dy, np.ones(n), b / 64, 0.0  # the gradient is a small difference
        yield np.where(np.arange(n) == 0, 100.0, x * 1e-3), dy, w, b, 0.0


@pytest.mark.parametrize("dtype", TYPES)
def test_bounds_hold_and_are_not_idle(dtype):
    worst = {"y": 0.0, "mean": 0.0, "rstd": 0.0, "dx": 0.0, "dweight": 0.0, "dbias": 0.0}
    for *arrays, eps in attacks(dtype):
        x, dy, w, b = (np.asarray(a).astype(dtype) for a in arrays)
        made, settings = {"x": x, "weight": w, "bias": b}, {"axis": -1, "eps": eps}
        y, mean, rstd = ig.layernorm(x, w, b, eps=eps, return_statistics=True)
        back = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": w}
        gradients = ig.layernorm_backward(dy, x, mean, rstd, w)
        for op, given, results, options in (
            (LAYERNORM, made, (y, mean, rstd), settings),
            (LAYERNORM_BACKWARD, back, gradients, {"axis": -1, "dweight": True, "dbias": True}),
        ):
            right, bounds = op.oracle(**given, **options), op.bound(dtype, **given, **options)
            for key, *each in zip(op.outputs, results, right, bounds, strict=True):
                worst[key] = max(worst[key], worst_error(*each))
    assert all(value <= 1 for value in worst.values()), worst
    assert all(value > 0.2 for value in worst.values()), worst


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_weight_and_bias_do_not_know_the_order_of_the_rows(dtype):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((3000, 8)) * np.exp2(rng.uniform(-9, 9, (3000, 1))) for _ in range(2))
    x, dy = x.astype(dtype), dy.astype(dtype)
    _, mean, rstd = ig.layernorm(x, return_statistics=True)
    order = rng.permutation(3000)
    dx, *sums = ig.layernorm_backward(dy, x, mean, rstd)
    moved, *again = ig.layernorm_backward(dy[order], x[order], mean[order], rstd[order])
    assert moved.tobytes() == dx[order].tobytes()
    assert [a.tobytes() for a in again] == [s.tobytes() for s in sums]


def test_special_rows():
    top = np.finfo(np.float32).max
    x = np.array(
        [[0, 0, 0], [2, 2, 2], [np.inf, 1, 2], [np.nan, 1, 2], [2e30, -1e30, -1e30], [top, top, top]], np.float32
    )
    y, mean, rstd = ig.layernorm(x, bias=np.array([1, 2, 3], np.float32), eps=1e-6, return_statistics=True)
    assert np.array_equal(y[:2], [[1, 2, 3]] * 2)
    assert rstd[0] == pytest.approx(1e3)
    assert mean[1] == 2
    assert np.isnan(y[2:4]).all()
    assert rstd[4] == 0  # the squares overflow
    assert np.array_equal(y[4], [1, 2, 3])
    assert mean[5] == np.inf  # the sum overflows
    assert np.isnan(y[5]).all()
    assert np.isnan(ig.layernorm(x[:1], eps=0.0)).all()  # 0 times infinity


def test_rows_far_from_zero_keep_their_spread():
    x = np.random.default_rng(1).standard_normal((4, 512)) + 1e4
    y = ig.layernorm(x.astype(np.float32), eps=0.0)
    right = LAYERNORM.oracle(x.astype(np.float32), eps=0.0)[0]
    assert np.abs(y - right).max() < 2e-3  # E[x^2] - E[x]^2 in float32 would leave nothing


# --- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(12,), (3, 4), (2, 3, 4)])
def test_as_torchs_own(dtype, sizes):
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    of, close = getattr(torch, dtype), {"atol": 1e-2, "rtol": 1e-2} if dtype == "float16" else {}
    for given in ((True, True), (True, False), (False, True), (False, False)):
        x = torch.randn((2, 12) if sizes == (12,) else (2, 3, 4), dtype=torch.float64).to(of).requires_grad_()
        w, b = (torch.randn(sizes, dtype=torch.float64).to(of).requires_grad_() if g else None for g in given)
        tensors = [t for t in (x, w, b) if t is not None]
        results = []
        for function in (igt.layer_norm, torch.nn.functional.layer_norm):
            y = function(x, list(sizes), w, b, 1e-5)
            results.append([y, *torch.autograd.grad(y, tensors, x.detach().sin())])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, **close)


def test_errors_are_layer_norms():
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    x, w = torch.randn(3, 4), torch.randn(4)
    for arguments, said in [
        ((x, (3,)), r"normalized_shape is \(3,\)"),
        ((x, (4,), w[:3]), "weight has shape"),
        ((x, (4,), None, w[:3]), "bias has shape"),
        ((x, (4,), w, w.double()), "bias has dtype"),
        ((x.int(), (4,)), "input has dtype"),
        ((x, (4,), w, w, -1.0), "eps is -1.0"),
    ]:
        with pytest.raises(ig.IsogradError, match=f"^layer_norm: {said}"):
            igt.layer_norm(*arguments)


def test_only_the_gradients_that_are_asked_for():
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    x, w, b = torch.randn(3, 4, requires_grad=True), torch.randn(4), torch.randn(4, requires_grad=True)
    dx, db = torch.autograd.grad(igt.layer_norm(x, (4,), w, b).sum(), (x, b))
    _, mean, rstd = ig.layernorm(x.detach(), w, return_statistics=True)
    expected = ig.layernorm_backward(torch.ones(3, 4), x.detach(), mean, rstd, w)
    assert torch.equal(dx, expected[0])
    assert torch.equal(db, expected[2])
