"""cross_entropy means what torch means by it, in every option, and its gradient is that of its values."""

import itertools

import numpy as np
import pytest
from cross_entropy_problems import NUMPY, raw

import isograd as ig
import isograd.core.arrays

torch = pytest.importorskip("torch", reason="needs torch")

SHAPES = [(6, 9), (5,), (3, 7, 4), (2, 5, 3, 4)]


def random_problem(rng, shape, kind, weighted):
    axis = 1 if len(shape) > 1 else 0
    rows = shape[:axis] + shape[axis + 1 :]
    x = 2 * rng.standard_normal(shape)
    if kind == "probabilities":
        t = rng.random(shape)
        t /= t.sum(axis=axis, keepdims=True)
    else:
        t = np.asarray(rng.integers(0, shape[axis], rows))
        if t.size > 2:
            t.reshape(-1)[1] = -100
    return x, t, rng.random(shape[axis]) if weighted else None


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_agrees(shape, reduction):
    rng = np.random.default_rng(20)
    for kind, weighted, smoothing in itertools.product(("index", "probabilities"), (False, True), (0.0, 0.2)):
        x, t, w = random_problem(rng, shape, kind, weighted)
        logits = torch.tensor(x, requires_grad=True)
        weight = None if w is None else torch.tensor(w)
        expected = torch.nn.functional.cross_entropy(
            logits, torch.tensor(t), weight, label_smoothing=smoothing, reduction=reduction
        )
        upstream = torch.tensor(rng.standard_normal(expected.shape))
        expected.backward(upstream)
        options = {"weight": w, "label_smoothing": smoothing, "reduction": reduction}
        loss, dx = ig.cross_entropy(x, t, **options, return_gradient=True, dloss=upstream.numpy())
        np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(dx, logits.grad.numpy(), rtol=1e-12, atol=1e-15)
        assert raw(ig.cross_entropy(x, t, **options)) == raw(loss)
        assert raw(ig.cross_entropy_backward(upstream.numpy(), x, t, **options)) == raw(dx)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_agrees_in_other_types(dtype):
    x = torch.tensor(2 * np.random.default_rng(21).standard_normal((50, 30))).to(getattr(torch, dtype))
    t = torch.arange(50) % 30
    expected = torch.nn.functional.cross_entropy(x.double(), t)
    loss, dx = ig.cross_entropy(x, t, return_gradient=True)
    assert loss.dtype == torch.float32
    assert dx.dtype == x.dtype
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["index", "probabilities"])
def test_gradient_is_the_slope(kind):
    rng = np.random.default_rng(22)
    x, t, w = random_problem(rng, (4, 6), kind, True)
    options = {"weight": w, "label_smoothing": 0.15, "z_loss": 0.03}
    for reduction in ("mean", "sum"):
        dx = ig.cross_entropy(x, t, **options, reduction=reduction, return_gradient=True)[1]
        h = 1e-5
        for place in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[place] = h
            up, down = (ig.cross_entropy(x + s, t, **options, reduction=reduction) for s in (step, -step))
            assert abs((up - down) / (2 * h) - dx[place]) < 1e-8


@pytest.mark.thorough
def test_z_loss_is_the_square_of_logsumexp():
    x = 3 * np.random.default_rng(23).standard_normal((5, 8))
    t = np.array([0, 1, 2, 3, -100])
    lse = np.log(np.exp(x).sum(1))
    plain, z = (ig.cross_entropy(x, t, z_loss=v, reduction="none") for v in (0.0, 0.5))
    np.testing.assert_allclose(z, plain + np.where(t < 0, 0, 0.5 * lse**2), rtol=1e-13)


def test_weights_in_the_storage_type_count_as_they_are():
    rng = np.random.default_rng(24)
    x, t = rng.standard_normal((5, 8)).astype(NUMPY["bfloat16"]), np.arange(5)
    w = rng.random(8).astype(NUMPY["bfloat16"])
    assert raw(ig.cross_entropy(x, t, w)) == raw(ig.cross_entropy(x, t, w.astype(np.float32)))


def test_the_state_saves_the_sums():
    x, t = np.random.default_rng(25).standard_normal((5, 8)).astype(np.float32), np.arange(5)
    loss, state = ig.cross_entropy(x, t, return_state=True)
    assert state.shape == (4, 5)
    dx = ig.cross_entropy_backward(2.5, x, t, state=state)
    assert raw(dx) == raw(ig.cross_entropy_backward(2.5, x, t))
    assert raw(loss) == raw(ig.cross_entropy(x, t))


def test_in_place_only_on_request():
    x, t = np.random.default_rng(26).standard_normal((5, 8)).astype(np.float32), np.arange(5)
    before = raw(x)
    _, dx = ig.cross_entropy(x, t, return_gradient=True)
    assert raw(x) == before
    out = x.copy()
    assert ig.cross_entropy(out, t, return_gradient=True, out=out)[1] is out
    assert raw(out) == raw(dx)
    out = x.copy()
    assert ig.cross_entropy_backward(1.0, out, t, out=out) is out
    assert raw(out) == raw(dx)


def test_the_count_of_the_whole_batch_gives_parts_the_gradients_of_the_whole():
    rng = np.random.default_rng(27)
    x, t = rng.standard_normal((40, 30)).astype(np.float32), rng.integers(0, 30, 40)
    whole, dx = ig.cross_entropy(x, t, return_gradient=True)
    total, parts = ig.LossAccumulator(), []
    for cut in (slice(0, 7), slice(7, 8), slice(8, 40)):
        losses = ig.cross_entropy(x[cut], t[cut], reduction="none")
        total.add(losses)
        parts.append(ig.cross_entropy(x[cut], t[cut], return_gradient=True, count=40)[1])
    assert raw(np.concatenate(parts)) == raw(dx)
    assert abs(total.mean(40) - whole) <= 2 * np.spacing(whole)


# --- arrays of every kind -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", NUMPY)
def test_tensors_on_the_cpu_have_the_same_bits(dtype):
    x = torch.randn(6, 9).to(getattr(torch, dtype))
    t = torch.arange(6, dtype=torch.int32)
    view = isograd.core.arrays.numpy_view
    loss, dx = ig.cross_entropy(x, t, return_gradient=True, label_smoothing=0.1)
    expected = ig.cross_entropy(view(x), t.numpy(), return_gradient=True, label_smoothing=0.1)
    assert (raw(view(loss)), raw(view(dx))) == tuple(map(raw, expected))
    again, state = ig.cross_entropy(x, t, return_state=True, label_smoothing=0.1)
    assert torch.equal(again, loss)
    back = ig.cross_entropy_backward(torch.ones(()).to(loss.dtype), x, t, state=state, label_smoothing=0.1)
    assert raw(view(back)) == raw(expected[1])
    with pytest.raises(ig.UnsupportedError, match="requires a gradient"):
        ig.cross_entropy(x.requires_grad_(), t)


def test_any_axis():
    rng = np.random.default_rng(28)
    x, t = rng.standard_normal((3, 4, 5)).astype(np.float32), rng.integers(0, 5, (3, 4))
    last = ig.cross_entropy(x, t, axis=-1, reduction="none")
    moved = ig.cross_entropy(np.moveaxis(x, -1, 1), t, reduction="none")
    assert raw(last) == raw(moved)


def test_recorded_by_an_encoder():
    x, t = np.random.default_rng(29).standard_normal((5, 8)).astype(np.float32), np.arange(5)
    with ig.Encoder():
        losses = ig.cross_entropy(x, t, reduction="none")
        with pytest.raises(ig.UnsupportedError, match="reduction"):
            ig.cross_entropy(x, t)
    assert raw(losses.result()) == raw(ig.cross_entropy(x, t, reduction="none"))


# --- the tape -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", NUMPY)
def test_on_the_tape(dtype):
    rng = np.random.default_rng(30)
    tape = ig.Tape()
    x, t = tape.leaf(rng.standard_normal((4, 6)).astype(NUMPY[dtype])), np.array([1, -100, 5, 0])
    loss = ig.cross_entropy(x, t, label_smoothing=0.1, z_loss=0.01)
    expected = ig.cross_entropy(x.value, t, label_smoothing=0.1, z_loss=0.01, return_gradient=True)
    t[:] = 0  # the tape has its own copy
    assert raw(loss.value) == raw(expected[0])
    assert raw(tape.backward(loss)[x]) == raw(expected[1])
    rows = ig.cross_entropy(x, np.array([1, -100, 5, 0]), reduction="none")
    g = rng.standard_normal(4).astype(loss.dtype)
    back = ig.cross_entropy_backward(g, x.value, np.array([1, -100, 5, 0]), reduction="none")
    assert raw(tape.backward(rows, g)[x]) == raw(back)


def test_what_the_tape_refuses():
    tape = ig.Tape()
    x = tape.leaf(np.ones((2, 3), np.float32))
    for options in ({"return_gradient": True}, {"return_state": True}):
        with pytest.raises(ig.InvalidProblemError, match=next(iter(options))):
            ig.cross_entropy(x, np.zeros(2, int), **options)
    with pytest.raises(ig.InvalidProblemError, match="targets"):
        ig.cross_entropy(x, x)
