"""What is special about rmsnorm: torch's spelling, the bounds under attack, and gradients of weights over many rows."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops.rmsnorm.operation import RMSNORM, RMSNORM_BACKWARD

TYPES = ["float16", "float32", "float64"]


def attacks(dtype):
    """(rows, gradients, weight, eps) that make roundings large beside the results."""
    rng = np.random.default_rng(5)
    top = {"float16": 2.0**7, "float64": 2.0**490}.get(dtype, 2.0**55)
    for n in (1, 2, 3, 17, 700, 6000):
        x, dy, w = rng.standard_normal((20, n)), rng.standard_normal((20, n)), rng.standard_normal(n)
        yield x, dy, w, 1e-6
        yield np.abs(x) * top, dy, w / top, 0.0
        yield x / top, dy, w, 1e-6
        yield x * np.exp2(rng.uniform(-20, 7, (20, n))), dy, w, 1e-5
        yield np.ones((20, n)) + 1e-3 * x, 1 + 1e-4 * dy, np.ones(n), 1e-6  # the gradient is a small difference
        yield np.where(np.arange(n) == 0, 100.0, x * 1e-3), dy, w, 0.0


@pytest.mark.parametrize("dtype", TYPES)
def test_bounds_hold_and_are_not_idle(dtype):
    worst = {"y": 0.0, "rstd": 0.0, "dx": 0.0, "dweight": 0.0}
    for *arrays, eps in attacks(dtype):
        x, dy, w = (np.asarray(a).astype(dtype) for a in arrays)
        made, settings = {"x": x, "weight": w}, {"axis": -1, "eps": eps}
        y, rstd = ig.rmsnorm(x, w, eps=eps, return_rstd=True)
        back = {"dy": dy, "x": x, "rstd": rstd, "weight": w}
        gradients = ig.rmsnorm_backward(dy, x, rstd, w)
        for op, given, results, options in (
            (RMSNORM, made, (y, rstd), settings),
            (RMSNORM_BACKWARD, back, gradients, {"axis": -1, "dweight": True}),
        ):
            right, bounds = op.oracle(**given, **options), op.bound(dtype, **given, **options)
            for key, *each in zip(op.outputs, results, right, bounds, strict=True):
                worst[key] = max(worst[key], worst_error(*each))
    assert all(value <= 1 for value in worst.values()), worst
    assert all(value > 0.2 for value in worst.values()), worst


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_a_weight_does_not_know_the_order_of_the_rows(dtype):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((3000, 8)).astype(dtype) * np.exp2(rng.uniform(-9, 9, (3000, 1))) for _ in range(2))
    x, dy = x.astype(dtype), dy.astype(dtype)
    _, rstd = ig.rmsnorm(x, return_rstd=True)
    order = rng.permutation(3000)
    dx, dweight = ig.rmsnorm_backward(dy, x, rstd)
    moved, again = ig.rmsnorm_backward(dy[order], x[order], rstd[order])
    assert moved.tobytes() == dx[order].tobytes()
    assert again.tobytes() == dweight.tobytes()
    folded = ig.rmsnorm_backward(dy.reshape(3, 10, 100, 8), x.reshape(3, 10, 100, 8), rstd.reshape(3, 10, 100))[1]
    assert folded.tobytes() == dweight.tobytes()


def test_special_rows():
    x = np.array([[0, 0], [np.inf, 1], [np.nan, 1], [-0.0, 3]], np.float32)
    y, rstd = ig.rmsnorm(x, eps=1e-6, return_rstd=True)
    assert np.array_equal(y[0], [0, 0])
    assert rstd[0] == pytest.approx(1e3)
    assert rstd[1] == 0
    assert np.isnan(y[1, 0])
    assert y[1, 1] == 0
    assert np.isnan(y[2]).all()
    assert np.signbit(y[3, 0])
    zero = ig.rmsnorm(x[:1], eps=0.0)
    assert np.isnan(zero).all()  # 0 times infinity


def test_a_subnormal_eps_is_not_zero():
    x = np.zeros((1, 3))
    assert np.isnan(ig.rmsnorm(x, eps=0.0)).all()
    assert not ig.rmsnorm(x, eps=1e-310).any()


# --- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(12,), (3, 4), (2, 3, 4)])
def test_as_torchs_own(dtype, sizes):
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    of = getattr(torch, dtype)
    for weighted in (True, False):
        for eps in (None, 1e-5):
            x = torch.randn(2, 3, 4, dtype=torch.float64).to(of).requires_grad_()
            x = x.detach().reshape(2, 12).requires_grad_() if sizes == (12,) else x
            w = torch.randn(sizes, dtype=torch.float64).to(of).requires_grad_() if weighted else None
            tensors = [x, w] if weighted else [x]
            results = []
            for function in (igt.rms_norm, torch.nn.functional.rms_norm):
                y = function(x, list(sizes), w, eps)
                results.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_errors_are_rms_norms():
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    x, w = torch.randn(3, 4), torch.randn(4)
    for arguments, said in [
        ((x, (3,)), r"normalized_shape is \(3,\)"),
        ((x, ()), "normalized_shape is"),
        ((x, (4,), w[:3]), "weight has shape"),
        ((x, (4,), w.double()), "weight has dtype"),
        ((x.int(), (4,)), "input has dtype"),
        ((x, (4,), w, -1.0), "eps is -1.0"),
        ((x, (4,), w, "a"), "eps is 'a'"),
        ((torch.zeros([1] * 9), (1,)), "shape .* has rank 9"),
    ]:
        with pytest.raises(ig.IsogradError, match=f"^rms_norm: {said}"):
            igt.rms_norm(*arguments)


def test_two_graphs_serve_any_eps():
    torch = pytest.importorskip("torch")
    from torch._dynamo.backends.registry import lookup_backend

    import isograd.torch as igt

    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda eps: igt.rms_norm(x, (4,), None, eps), backend=backend, fullgraph=True)
    for eps in (1e-6, 1e-5, 0.5, 2.5, 0.125):
        assert torch.equal(compiled(eps), igt.rms_norm(x, (4,), None, eps))
    assert graphs <= 2


def test_a_frozen_weight_costs_no_gradient():
    torch = pytest.importorskip("torch")
    import isograd.torch as igt

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    (dx,) = torch.autograd.grad(igt.rms_norm(x, (4,), w).sum(), x)
    rstd = ig.rmsnorm(x.detach(), w, eps=2.0**-23, return_rstd=True)[1]
    assert torch.equal(dx, ig.rmsnorm_backward(torch.ones(3, 4), x.detach(), rstd, w)[0])
