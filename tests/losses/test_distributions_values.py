"""Values against torch, gradients against finite differences, special values, empty arrays, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from distributions import DTYPES, REDUCTIONS, log_softmax, named, raw, softmax, work

import isograd as ig
import isograd.core.arrays
import isograd.tape as tp
from isograd.ops.gumbel_softmax import reference as gumbel_reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
RNG = np.random.default_rng(50)


def normal(*shape, dtype=np.float64):
    return RNG.standard_normal(shape).astype(dtype)


# --- against torch ---------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(reduction, log_target):
    torch = pytest.importorskip("torch")
    for shape in ((7,), (3, 5), (2, 3, 4), ()):
        x = torch.tensor(normal(*shape), requires_grad=True)
        t = torch.tensor(-np.abs(normal(*shape)) if log_target else np.abs(normal(*shape)), requires_grad=True)
        with torch.no_grad():
            if t.dim() and not log_target:
                t.view(-1)[0] = 0
        loss = torch.nn.functional.kl_div(x, t, reduction=reduction, log_target=log_target)
        ours = ig.kl_div(x.detach(), t.detach(), reduction, log_target)
        assert isinstance(ours, torch.Tensor)
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=1e-12)
        g = torch.tensor(normal(*loss.shape))
        dx, dt = torch.autograd.grad(loss, (x, t), g)
        for wrt, expected in (("input", dx), ("target", dt)):
            got = ig.kl_div_backward(g, x.detach(), t.detach(), reduction, log_target, wrt)
            if wrt == "target" and not log_target and t.dim():  # torch has -inf or NaN where the target is 0
                assert got.view(-1)[0] == 0
                got, expected = got.view(-1)[1:], expected.reshape(-1)[1:]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_is_the_composition_in_torch(temperature):
    torch = pytest.importorskip("torch")
    x, t = torch.tensor(normal(6, 9), requires_grad=True), torch.tensor(normal(6, 9))
    log_q, log_p = (torch.log_softmax(v / temperature, -1) for v in (x, t))
    loss = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2
    torch.testing.assert_close(ig.distillation_loss(x.detach(), t, temperature), loss.detach(), rtol=1e-12, atol=1e-14)
    (dx,) = torch.autograd.grad(loss, x)
    ours = ig.distillation_loss_backward(torch.ones((), dtype=torch.float64), x.detach(), t, temperature)
    torch.testing.assert_close(ours, dx, rtol=1e-10, atol=1e-14)


@pytest.mark.thorough
def test_named_classes_are_a_coarser_distribution():
    # Merge the classes that are not named into one, then take the whole divergence of what is left.
    x, t = normal(5, 12), normal(5, 12)
    kept, indices = named(RNG, t, 4)
    q, p = np.exp(log_softmax(x)), np.exp(kept)
    q_kept = np.take_along_axis(q, indices, -1)
    merged = [np.append(a, 1 - a.sum(-1, keepdims=True), axis=-1) for a in (p, q_kept)]
    expected = (merged[0] * np.log(merged[0] / merged[1])).sum(-1)
    np.testing.assert_allclose(ig.distillation_loss(x, kept, 1.0, indices, "none"), expected, rtol=1e-10)
    # All classes named: the whole divergence.
    kept, indices = named(RNG, t, 12)
    whole = ig.distillation_loss(x, t, reduction="none")
    np.testing.assert_allclose(ig.distillation_loss(x, kept, 1.0, indices, "none"), whole, rtol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_is_torchs_given_the_same_noise(hard, monkeypatch):
    torch = pytest.importorskip("torch")
    x = torch.tensor(normal(6, 9), requires_grad=True)
    noise = torch.tensor(gumbel_reference.noise((6, 9), np.float64, 3, 17))
    # torch draws exponentials and takes -log of them.
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self: self.copy_(torch.exp(-noise)))
    y = torch.nn.functional.gumbel_softmax(x, 0.6, hard, dim=0)
    monkeypatch.undo()
    ours = ig.gumbel_softmax(x.detach(), 0.6, hard, 0, seed=3, offset=17)
    torch.testing.assert_close(ours, y.detach(), rtol=1e-10, atol=1e-14)
    dy = torch.tensor(normal(6, 9))
    (dx,) = torch.autograd.grad(y, x, dy)
    soft = ig.gumbel_softmax(x.detach(), 0.6, False, 0, seed=3, offset=17)
    torch.testing.assert_close(ig.gumbel_softmax_backward(dy, soft, 0.6, 0), dx, rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
def test_sparsemax_is_the_projection_onto_the_simplex():
    # The nearest point: no step towards any vertex, nor to any other point of the simplex, is nearer.
    for scale in (0.1, 1, 10):
        x = normal(20, 15) * scale
        y = ig.sparsemax(x)
        np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-12)
        assert (y >= 0).all()
        gradient = y - x
        assert ((np.eye(15)[None] - y[:, None]) @ gradient[..., None] > -1e-9).all()


# --- gradients -------------------------------------------------------------------------------------------------------
KEPT, INDICES = named(np.random.default_rng(51), normal(4, 7), 3)
TEACHER, PROBABILITIES = normal(4, 7), softmax(normal(4, 7))
CASES = {
    "kl_div": (lambda x, t: ig.kl_div(x, t, "none"), [normal(4, 7), PROBABILITIES]),
    "kl_div mean": (lambda x, t: tp.kl_div(x, t), [normal(4, 7), PROBABILITIES]),
    "kl_div log": (lambda x, t: tp.kl_div(x, t, "sum", True), [normal(4, 7), normal(4, 7)]),
    "kl_div constant target": (lambda x: ig.kl_div(x, PROBABILITIES, "batchmean"), [normal(4, 7)]),
    "kl_div constant input": (lambda t: ig.kl_div(TEACHER, t, "batchmean"), [PROBABILITIES]),
    "distillation": (lambda x: ig.distillation_loss(x, TEACHER, 2.0), [normal(4, 7)]),
    "distillation none": (lambda x: tp.distillation_loss(x, TEACHER, 0.7, None, "none"), [normal(4, 7)]),
    "distillation named": (lambda x: ig.distillation_loss(x, KEPT, 1.7, INDICES, "sum"), [normal(4, 7)]),
    "distillation mean": (lambda x: ig.distillation_loss(x, KEPT, 1.0, INDICES, "mean"), [normal(4, 7)]),
    "gumbel_softmax": (lambda x: ig.gumbel_softmax(x, 0.8, seed=1), [normal(4, 7)]),
    "gumbel_softmax axis": (lambda x: tp.gumbel_softmax(x, 2.0, False, 0, seed=1, offset=5), [normal(4, 7)]),
    "sparsemax": (lambda x: ig.sparsemax(x), [normal(4, 7)]),
    "sparsemax axis": (lambda x: tp.sparsemax(x, 0), [normal(4, 7) * 0.3]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_gradients_against_finite_differences(name):
    function, operands = CASES[name]

    def total(values):
        tape = ig.Tape()
        leaves = [tape.leaf(v) for v in values]
        out = function(*leaves)
        weights = np.cos(np.arange(out.size)).reshape(out.shape)
        return tape, leaves, (out * weights).sum()

    tape, leaves, loss = total(operands)
    gradients = tape.backward(loss)
    for i, operand in enumerate(operands):
        for place in np.ndindex(operand.shape):
            step = 1e-6
            ends = []
            for sign in (1, -1):
                moved = [v.copy() for v in operands]
                moved[i][place] += sign * step
                ends.append(total(moved)[2].item())
            assert gradients[leaves[i]][place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-5, abs=1e-7)


@each_dtype
def test_tape_and_functions_give_the_same_bits(dtype):
    x, t = normal(4, 9).astype(dtype), normal(4, 9).astype(dtype)
    g = np.array(0.75, work(dtype))
    tape = ig.Tape()
    leaf = tape.leaf(x)
    loss = ig.distillation_loss(leaf, t, 2.0)
    teacher = t.copy()
    t[...] = 0  # the tape keeps what it was given
    assert raw(loss.value) == raw(ig.distillation_loss(x, teacher, 2.0))
    expected = ig.distillation_loss_backward(g, x, teacher, 2.0)
    assert raw(tape.backward(loss, g)[leaf]) == raw(expected)
    hard, dy = ig.gumbel_softmax(leaf, 0.5, True, seed=6), normal(4, 9).astype(dtype)
    assert raw(hard.value) == raw(ig.gumbel_softmax(x, 0.5, True, seed=6))
    soft = ig.gumbel_softmax(x, 0.5, seed=6)
    assert raw(tape.backward(hard, dy)[leaf]) == raw(ig.gumbel_softmax_backward(dy, soft, 0.5))


# --- faults that users met elsewhere ---------------------------------------------------------------------------------
@each_dtype
def test_a_probability_of_zero_has_no_part_in_a_divergence(dtype):
    p = np.array([[0, 0.5, 0.5, 0]], dtype)
    for x in ([-np.inf, -0.5, -1, 3], [-1e4, -0.5, -1, np.inf]):
        terms = ig.kl_div(np.array([x], dtype), p, "none")
        assert terms[0, 0] == terms[0, 3] == 0
        assert np.isfinite(terms).all()
        dt = ig.kl_div_backward(np.ones((1, 4), work(dtype)), np.array([x], dtype), p, "none", wrt="target")
        assert dt[0, 0] == dt[0, 3] == 0
    with np.errstate(all="ignore"):
        log_p = np.log(p.astype(np.float64)).astype(dtype)
    terms = ig.kl_div(np.array([[-np.inf, -0.5, -1, 3]], dtype), log_p, "none", True)
    assert np.isfinite(terms).all()
    # Probabilities that underflow, where 0 * log 0 would be NaN.
    far = np.array([[0, -200, -6e4, -np.inf]], dtype)
    near = np.zeros((1, 4), dtype)
    for student, teacher in ((near, far), (far, far)):
        loss = ig.distillation_loss(student, teacher)
        assert np.isfinite(loss)
        assert np.isfinite(ig.distillation_loss_backward(np.ones((), work(dtype)), student, teacher)).all()
    assert ig.distillation_loss(far, far) == 0
    assert ig.distillation_loss(np.array([[0, -np.inf]], dtype), np.zeros((1, 2), dtype)) == np.inf
    assert np.isnan(ig.kl_div(np.array([np.nan], dtype), np.zeros(1, dtype), "none"))


@each_dtype
def test_masked_rows(dtype):
    inf, nan = np.inf, np.nan
    x = np.array([[1, 2, -inf, 0], [-inf] * 4, [0, 1, 2, 3], [nan, 0, 0, 0], [inf, 0, 0, 0]], dtype)
    t = np.array([[2, 2, -inf, 1]] * 5, dtype)
    losses = ig.distillation_loss(x, t, reduction="none")
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True, True])
    np.testing.assert_array_equal(np.isnan(ig.distillation_loss(t, x, reduction="none")), np.isnan(losses))
    g = np.ones(5, work(dtype))
    dx = ig.distillation_loss_backward(g, x, t, reduction="none")
    np.testing.assert_array_equal(np.isnan(dx).all(1), np.isnan(losses))
    assert dx[0, 2] == 0
    assert np.isfinite(dx[[0, 2]]).all()
    kept, indices = np.log(np.full((5, 2), 0.5)).astype(dtype), np.tile([0, 1], (5, 1))
    losses = ig.distillation_loss(x, kept, 1.0, indices, "none")
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True, True])
    for y in (ig.gumbel_softmax(x, seed=0), ig.gumbel_softmax(x, hard=True, seed=0), ig.sparsemax(x)):
        np.testing.assert_array_equal(np.isnan(y).all(1), [False, True, False, True, True])
        np.testing.assert_array_equal(np.isnan(y).any(1), [False, True, False, True, True])
        assert y[0, 2] == 0
    # A NaN in the gradient reaches its own row only.
    y = ig.sparsemax(x[[0, 2]])
    dy = np.array([[nan, 1, 1, 1], [1, 1, 1, 1]], dtype)
    assert np.isfinite(ig.sparsemax_backward(dy, y)[1]).all()
    assert np.isfinite(ig.gumbel_softmax_backward(dy, softmax(x[[0, 2]]))[1]).all()


def test_a_rest_without_classes_is_none():
    # The teacher's named classes sum to 1 but for rounding; the student has masked all others, or there are none.
    p = np.array([[0.1, 0.2, 0.7]], np.float32)
    x = np.array([[1, 2, 3, -np.inf, -np.inf]], np.float32)
    indices = np.array([[0, 1, 2]])
    for student in (x, x[:, :3]):
        loss = ig.distillation_loss(student, np.log(p), 1.0, indices)
        assert 0 < loss < 1
        assert np.isfinite(
            ig.distillation_loss_backward(np.ones((), np.float32), student, np.log(p), 1.0, indices)
        ).all()
    # A rest that is far below the quantum of the sum is still known.
    far = np.array([[0, 0, 0, -80, -80]], np.float32)
    half = np.log(np.full((1, 3), 1 / 6, np.float32))
    expected = 0.5 * np.log(0.5 * 3 / (2 * np.exp(-80))) + 0.5 * np.log(0.5)
    assert ig.distillation_loss(far, half, 1.0, indices) == pytest.approx(expected, rel=1e-6)


@each_dtype
def test_logits_at_minus_ten_million(dtype):
    shift = -6e4 if dtype == np.float16 else -1e7
    x = (np.array([[0, 1, 2, 4]]) * 64).astype(dtype)
    far = (x.astype(np.float64) + shift).astype(dtype)
    near = (far.astype(np.float64) - shift).astype(dtype)
    t = np.zeros((1, 4), dtype)
    assert raw(ig.distillation_loss(t, far)) == raw(ig.distillation_loss(t, near))
    assert np.isfinite(ig.distillation_loss(far, t))
    assert raw(ig.sparsemax(far)) == raw(ig.sparsemax(near))
    log_p = log_softmax(far)
    assert np.isfinite(ig.kl_div(log_p, log_p, "sum", True))


@each_dtype
def test_empty_arrays(dtype):
    of = work(dtype)
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)):
        x = np.zeros(shape, dtype)
        assert ig.kl_div(x, x, "sum") == 0
        assert np.isnan(ig.kl_div(x, x, "mean"))
        assert ig.kl_div(x, x, "none").shape == shape
        assert ig.kl_div_backward(np.ones((), of), x, x, "sum").shape == shape
        losses = ig.distillation_loss(x, x, reduction="none")
        assert losses.shape == shape[:-1]
        assert (losses == 0).all()
        assert ig.distillation_loss(x, x, reduction="sum") == 0
        assert np.isnan(ig.distillation_loss(x, x)) == (shape[0] == 0 and len(shape) > 1)
        assert ig.distillation_loss_backward(np.ones((), of), x, x).shape == shape
        for axis in range(len(shape)):
            assert ig.gumbel_softmax(x, axis=axis, seed=0).shape == ig.sparsemax(x, axis).shape == shape
            assert ig.gumbel_softmax_backward(x, x, axis=axis).shape == ig.sparsemax_backward(x, x, axis).shape == shape
    x = np.zeros((0, 5), dtype)
    kept, indices = np.zeros((0, 2), dtype), np.zeros((0, 2), np.int32)
    assert ig.distillation_loss(x, kept, 1.0, indices, "none").shape == (0,)
    assert ig.distillation_loss_backward(np.ones((), of), x, kept, 1.0, indices).shape == (0, 5)


@each_dtype
def test_expanded_upstream_gradients(dtype):
    x, t = normal(5, 8).astype(dtype), normal(5, 8).astype(dtype)
    of = work(dtype)
    y = softmax(x)
    for source in (np.array(0.3), np.array([[0.5], [1], [2], [-1], [0]]), np.arange(8.0)):
        dy = np.broadcast_to(source.astype(dtype), (5, 8))
        g = np.broadcast_to(source.astype(of), (5, 8))
        for call, upstream in (
            (lambda v: ig.gumbel_softmax_backward(v, y, 0.5), dy),
            (lambda v: ig.sparsemax_backward(v, ig.sparsemax(x)), dy),
            (lambda v: ig.kl_div_backward(v, x, y, "none"), g),
        ):
            assert raw(call(upstream)) == raw(call(np.ascontiguousarray(upstream)))
    g = np.broadcast_to(np.array(0.7, of), (5,))
    dx = ig.distillation_loss_backward(g, x, t, reduction="none")
    assert raw(dx) == raw(ig.distillation_loss_backward(np.full(5, 0.7, of), x, t, reduction="none"))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_keep_their_kind(name):
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    t = torch.flip(x, (0,)).T.contiguous().T
    array, other = (isograd.core.arrays.numpy_view(v) for v in (x, t))
    g = torch.ones((), dtype=torch.float64 if name == "float64" else torch.float32)
    pairs = [
        (ig.distillation_loss(x, t, 2.0), ig.distillation_loss(array, other, 2.0)),
        (ig.distillation_loss_backward(g, x, t), ig.distillation_loss_backward(g.numpy(), array, other)),
        (ig.kl_div(x, t, "none"), ig.kl_div(array, other, "none")),
        (ig.gumbel_softmax(x, seed=2), ig.gumbel_softmax(array, seed=2)),
        (ig.sparsemax(t), ig.sparsemax(other)),
    ]
    for tensor, expected in pairs:
        assert isinstance(tensor, torch.Tensor)
        assert raw(isograd.core.arrays.numpy_view(tensor)) == raw(expected)
    for result in (ig.kl_div(x.requires_grad_(), t), ig.distillation_loss(x, t), ig.gumbel_softmax(x, seed=2)):
        assert result.requires_grad
    with pytest.raises(ig.UnsupportedError, match="teacher requires a gradient"):
        ig.distillation_loss(t, x)


def test_an_encoder_records():
    x, t = normal(3, 5).astype(np.float32), normal(3, 5).astype(np.float32)
    with ig.Encoder() as encoder:
        loss = ig.distillation_loss(x, t)
        y = ig.sparsemax(x)
        dx = ig.sparsemax_backward(t, y)
    assert raw(np.asarray(loss)) == raw(ig.distillation_loss(x, t))
    x[...] = t
    encoder.replay()
    assert float(loss) == 0
    assert raw(np.asarray(dx)) == raw(ig.sparsemax_backward(t, ig.sparsemax(t)))


# --- errors ----------------------------------------------------------------------------------------------------------
X = normal(4, 6).astype(np.float32)
G = np.ones((), np.float32)
LP, WHERE = named(np.random.default_rng(52), X, 3)
REFUSED = {
    "reduction": (lambda: ig.kl_div(X, X, "average"), ig.InvalidProblemError, ["kl_div", "reduction", "batchmean"]),
    "log_target": (lambda: ig.kl_div(X, X, "sum", 1), ig.InvalidProblemError, ["log_target"]),
    "shapes": (lambda: ig.kl_div(X, X[:3]), ig.InvalidProblemError, ["target", "(3, 6)", "(4, 6)"]),
    "dtypes": (lambda: ig.kl_div(X, X.astype(np.float64)), ig.InvalidProblemError, ["target", "float64"]),
    "integers": (lambda: ig.kl_div(X.astype(int), X), ig.UnsupportedError, ["input", "int64"]),
    "wrt": (lambda: ig.kl_div_backward(G, X, X, wrt="both"), ig.InvalidProblemError, ["wrt", "both"]),
    "dloss": (lambda: ig.kl_div_backward(X, X, X), ig.InvalidProblemError, ["dloss", "(4, 6)"]),
    "dloss dtype": (lambda: ig.kl_div_backward(G.astype(np.float64), X, X), ig.InvalidProblemError, ["dloss"]),
    "temperature": (lambda: ig.distillation_loss(X, X, 0.0), ig.InvalidProblemError, ["temperature", "0.0"]),
    "negative": (lambda: ig.distillation_loss(X, X, -1), ig.InvalidProblemError, ["temperature", "-1"]),
    "infinite": (lambda: ig.distillation_loss(X, X, np.inf), ig.InvalidProblemError, ["temperature"]),
    "text": (lambda: ig.distillation_loss(X, X, "2"), ig.InvalidProblemError, ["temperature", "'2'"]),
    "teacher": (lambda: ig.distillation_loss(X, X[:, :5]), ig.InvalidProblemError, ["teacher", "(4, 5)"]),
    "wide teacher": (lambda: ig.distillation_loss(X, X.astype(float)), ig.InvalidProblemError, ["teacher has dtype"]),
    "scalar student": (lambda: ig.distillation_loss(G, G), ig.InvalidProblemError, ["rank 0"]),
    "indices": (lambda: ig.distillation_loss(X, LP, 1.0, WHERE[:3]), ig.InvalidProblemError, ["indices", "(3, 3)"]),
    "too many": (lambda: ig.distillation_loss(X, LP, 1.0, np.zeros((4, 7), int)), ig.InvalidProblemError, ["classes"]),
    "no indices": (
        lambda: ig.distillation_loss(X, LP, 1.0, np.zeros((4, 0), int)),
        ig.InvalidProblemError,
        ["classes"],
    ),
    "float indices": (lambda: ig.distillation_loss(X, LP, 1.0, LP), ig.UnsupportedError, ["indices", "int64"]),
    "tau": (lambda: ig.gumbel_softmax(X, 0, seed=0), ig.InvalidProblemError, ["tau"]),
    "hard": (lambda: ig.gumbel_softmax(X, 1.0, "yes", seed=0), ig.InvalidProblemError, ["hard", "yes"]),
    "axis": (lambda: ig.gumbel_softmax(X, axis=2, seed=0), ig.InvalidProblemError, ["axis", "2"]),
    "float axis": (lambda: ig.sparsemax(X, 1.0), ig.InvalidProblemError, ["axis", "1.0"]),
    "seed": (lambda: ig.gumbel_softmax(X, seed=-1), ig.InvalidProblemError, ["seed", "-1"]),
    "offset": (lambda: ig.gumbel_softmax(X, seed=0, offset=2**64), ig.InvalidProblemError, ["offset"]),
    "sparse shapes": (lambda: ig.sparsemax_backward(X, X[:2]), ig.InvalidProblemError, ["dy", "(4, 6)"]),
    "lists": (lambda: ig.sparsemax([1.0, 2.0]), ig.InvalidProblemError, ["x", "list"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, kind, fragments = REFUSED[name]
    with pytest.raises(ig.IsogradError) as caught:
        call()
    assert type(caught.value) is kind
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint32])
def test_an_index_that_is_no_class(index):
    for value in (6, 2**31 - 1) + (() if index == np.uint32 else (-1, -6)):
        indices = WHERE.astype(index)
        indices[2, 1] = value
        out = np.full_like(X, 7)
        for call in (
            lambda i=indices: ig.distillation_loss(X, LP, 1.0, i),
            lambda i=indices, o=out: ig.distillation_loss_backward(G, X, LP, 1.0, i, out=o),
        ):
            with pytest.raises(ig.IndexOutOfRangeError, match=rf"indices\[2, 1\] is {value}; .* 0 to 5"):
                call()
        assert (out == 7).all()


def test_repeated_indices():
    indices = WHERE.copy()
    indices[3, 0] = indices[3, 2]
    with pytest.raises(ig.InvalidProblemError, match=rf"indices\[3\] names class {indices[3, 2]} twice"):
        ig.distillation_loss(X, LP, 1.0, indices)


def test_teachers_of_another_width():
    x = X.astype(ml_dtypes.bfloat16)
    loss = ig.distillation_loss(x, X)
    assert raw(loss) == raw(ig.distillation_loss(x.astype(np.float32), X))
    assert raw(ig.distillation_loss(X, x)) == raw(ig.distillation_loss(X, x.astype(np.float32)))


def test_noise_has_no_default_seed():
    tape = ig.Tape()
    for logits in (X, tape.leaf(X)):
        with pytest.raises(TypeError, match="seed"):
            ig.gumbel_softmax(logits)
    with pytest.raises(TypeError, match="seed"):
        tp.gumbel_softmax(tape.leaf(X))
