"""Arrays of NumPy's subclasses: what only adds to an array is taken as one; a mask is refused, at every entrance."""

import numpy as np
import pytest

import isograd as ig
from isograd.elementwise import api as elementwise
from isograd.numerics.matmul import matmul
from isograd.reduction import api as reduction

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype(np.float32)
SQUARE = RNG.normal(size=(4, 4)).astype(np.float32)
Q = RNG.normal(size=(1, 1, 4, 16)).astype(np.float32)
PLACES = RNG.integers(0, 4, (4, 2))
TARGETS = RNG.integers(0, 6, 4)
ORDER = RNG.permutation(4)
WEIGHT = RNG.random(6).astype(np.float32)
ROWS = RNG.random((2, 2)).astype(np.float32)
VISIBLE = RNG.random((4, 4)) < 0.7
SEGMENTS = np.zeros((1, 4), np.int32)
ENDS = np.array([0, 4], np.int32)
LENGTHS, TABLE = np.array([3], np.int32), np.zeros((1, 1), np.int32)


def accumulated(losses):
    total = ig.LossAccumulator()
    total.add(losses)
    return total.total()


def planned(x, y):
    out = np.empty(x.shape, np.float32).view(type(y))
    ig.SoftmaxPlan.select(ig.SoftmaxDescriptor(x.shape, "float32")).run(x=x, y=out)
    return out


def taped(function, *leaves):
    """The gradients of the sum of a function's result, which has to take its other arguments from outside."""
    tape = ig.Tape()
    variables = [tape.leaf(x) for x in leaves]
    out = function(*variables)
    out = out[0] if isinstance(out, tuple) else out
    return [tape.backward((out * out).sum())[v] for v in variables]


def upstream(g):
    tape = ig.Tape()
    v = tape.leaf(X)
    return tape.backward(v * v, g)[v]


CALLS = {
    "softmax": (ig.softmax, X),
    "softmax_backward": (ig.softmax_backward, X, X),
    "plan": (planned, X, X),
    "take_along_axis": (ig.take_along_axis, X, PLACES),
    "take_along_axis_backward": (lambda g, i: ig.take_along_axis_backward(g, i, (4, 6)), X[:, :2], PLACES),
    "scatter_sum": (ig.scatter_sum, X, PLACES, X[:, :2]),
    "segment_sum": (lambda x, i: ig.segment_sum(x, i, 4), X, ORDER),
    "embedding": (ig.embedding, X, PLACES),
    "cross_entropy": (ig.cross_entropy, X, TARGETS, WEIGHT),
    "linear_cross_entropy": (ig.linear_cross_entropy, X, RNG.normal(size=(6, 6)).astype(np.float32), TARGETS),
    "kl_div": (ig.kl_div, X, np.abs(X)),
    "distillation_loss": (ig.distillation_loss, X, X[::-1]),
    "gumbel_softmax": (lambda x: ig.gumbel_softmax(x, seed=1), X),
    "dropout": (lambda x: ig.dropout(x, seed=1), X),
    "rotary": (ig.rotary, X, X[:, :2], X[:, 2:4]),
    "silu": (ig.silu, X),
    "gelu": (ig.gelu, X),
    "silu_mul": (ig.silu_mul, X, X[::-1]),
    "gelu_mul": (ig.gelu_mul, X, X[::-1]),
    "swiglu": (ig.swiglu, X),
    "geglu": (ig.geglu, X),
    "add_rmsnorm": (ig.add_rmsnorm, X, X[::-1]),
    "add_layernorm": (ig.add_layernorm, X, X[::-1]),
    "sparsemax": (ig.sparsemax, X),
    "top_k": (lambda x: ig.top_k(x, 2), X),
    "moe_router": (lambda x, b: ig.moe_router(x, 2, bias=b), X, WEIGHT),
    "moe_permute": (lambda x, o: ig.moe_permute(x, o, 2), ROWS, ORDER),
    "moe_combine": (ig.moe_combine, SQUARE, ROWS, ORDER),
    "load_balancing_loss": (ig.load_balancing_loss, SQUARE, PLACES),
    "attention": (lambda q, m: ig.attention(q, q, q, mask=m), Q, VISIBLE),
    "segments": (lambda q, s: ig.attention(q, q, q, segment_ids=(s, s)), Q, SEGMENTS),
    "packed": (lambda q, e: ig.attention(q, q, q, cu_seqlens=(e, e)), Q, ENDS),
    "attention_with_cache": (lambda q, n: ig.attention_with_cache(q, q, q, n), Q, LENGTHS),
    "pages": (lambda q, n, t: ig.attention_with_cache(q, q, q, n, block_table=t), Q, LENGTHS, TABLE),
    "accumulator": (accumulated, X),
    "exp": (elementwise.exp, X),
    "sigmoid_backward": (elementwise.sigmoid_backward, X, X),
    "sum": (lambda x: reduction.sum(x, 0), X),
    "mean": (lambda x: reduction.mean(x, 1, keepdims=True), X),
    "matmul": (matmul, SQUARE, X),
    "tape leaf": (lambda x: taped(lambda v: v @ v, x), SQUARE),
    "tape constant": (lambda x, c: taped(lambda v: v * c + c, x), X, X),
    "tape upstream": (upstream, X),
    "tape top_k": (lambda x: taped(lambda v: ig.top_k(v, 2), x), X),
    "tape embedding": (lambda x, i: taped(lambda v: ig.embedding(v, i), x), X, PLACES),
    "tape take_along_axis": (lambda x, i: taped(lambda v: ig.take_along_axis(v, i), x), X, PLACES),
    "tape segment_sum": (lambda x, i: taped(lambda v: ig.segment_sum(v, i, 4), x), X, ORDER),
    "tape cross_entropy": (lambda x, t, w: taped(lambda v: ig.cross_entropy(v, t, w), x), X, TARGETS, WEIGHT),
    "tape distillation_loss": (lambda x, t: taped(lambda v: ig.distillation_loss(v, t), x), X, X[::-1]),
    "tape distillation_loss of some": (
        lambda x, t, i: taped(lambda v: ig.distillation_loss(v, t, 1.0, i), x), X, np.log([[0.3, 0.4]] * 4, dtype="f"),
        np.array([[0, 1]] * 4),
    ),
    "tape moe_permute": (lambda x, o: taped(lambda v: ig.moe_permute(v, o, 2), x), ROWS, ORDER),
    "tape moe_combine": (lambda x, w, o: taped(lambda v: ig.moe_combine(v, w, o), x), SQUARE, ROWS, ORDER),
    "tape load_balancing_loss": (lambda x, e: taped(lambda v: ig.load_balancing_loss(v, e), x), SQUARE, PLACES),
    "tape attention": (lambda q, m: taped(lambda v: ig.attention(v, v, v, mask=m), q), Q, VISIBLE),
    "tape segments": (lambda q, s: taped(lambda v: ig.attention(v, v, v, segment_ids=(s, s)), q), Q, SEGMENTS),
    "tape packed": (lambda q, e: taped(lambda v: ig.attention(v, v, v, cu_seqlens=(e, e)), q), Q, ENDS),
}  # fmt: skip


def results(call):
    function, *operands = call
    return [np.asarray(r) for r in np.atleast_1d(np.array(function(*operands), object)).flat]


def as_matrix(x):
    return x.view(np.matrix) if x.ndim == 2 else x


@pytest.fixture(scope="module")
def memory_map(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")

    def mapped(x):
        path = folder / f"{len(list(folder.iterdir()))}.npy"
        np.save(path, x)
        return np.load(path, mmap_mode="r")

    return mapped


@pytest.mark.parametrize("name", CALLS)
def test_subclasses_are_taken_as_arrays(name, memory_map):
    function, *operands = CALLS[name]
    expected = results((function, *operands))
    for kind in (as_matrix, memory_map, lambda x: x.view(np.recarray)):
        given = [kind(x) for x in operands]
        found = results((function, *given))
        assert [(a.shape, a.tobytes()) for a in found] == [(a.shape, a.tobytes()) for a in expected]


@pytest.mark.parametrize("name", CALLS)
def test_masks_are_refused(name):
    function, *operands = CALLS[name]
    for place in range(len(operands)):
        given = list(operands)
        given[place] = np.ma.masked_array(
            given[place], mask=np.arange(given[place].size).reshape(given[place].shape) < 2
        )
        with pytest.raises(ig.InvalidProblemError, match="masked array"):
            function(*given)


class Exported:
    """An array of another library with DLPack alone, or with a namespace for results too."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Named(Exported):
    def __array_namespace__(self, **options):
        return pytest.importorskip("torch", reason="needs torch")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_arrays_by_dlpack(dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.from_numpy(X).to(getattr(torch, dtype))
    places = torch.from_numpy(PLACES)
    for view in (x, x.t()[:4, :4], x[::2, 1:]):
        y, taken = ig.softmax(view), ig.take_along_axis(x, places)
        plain = ig.softmax(Exported(view))
        assert plain.dtype.name == dtype
        assert plain.tobytes() == y.contiguous().view(torch.uint8).numpy().tobytes()
        named = ig.softmax(Named(view))
        assert type(named) is torch.Tensor
        assert torch.equal(named, y)
        assert torch.equal(ig.take_along_axis(Named(x), Exported(places)), taken)
    values, indices = ig.top_k(Named(x), 2)
    assert torch.equal(values, ig.top_k(x, 2).values)
    assert torch.equal(indices, ig.top_k(x, 2).indices)
    with pytest.raises(ig.UnsupportedError, match="x is a Named, which a recording cannot"), ig.Encoder():
        ig.softmax(Named(x))


def test_memory_by_dlpack_is_shared_and_kept():
    torch = pytest.importorskip("torch", reason="needs torch")
    from isograd.core import dlpack

    x = torch.arange(6).bfloat16()
    view = dlpack.taken(Exported(x))
    x[0] = 7
    assert view[0] == 7
    del x
    assert view.tolist() == [7, 1, 2, 3, 4, 5]
    back = torch.from_dlpack(dlpack.given(view.copy()))
    assert back.dtype is torch.bfloat16
    assert back.tolist() == [7, 1, 2, 3, 4, 5]
    dlpack.given(view.copy())  # a capsule that nobody takes frees its memory


def test_types_that_dlpack_has_and_kernels_have_not():
    torch = pytest.importorskip("torch", reason="needs torch")
    with pytest.raises(ig.InvalidProblemError, match="softmax: x is a Exported that DLPack cannot hand over"):
        ig.softmax(Exported(torch.ones(3).to(torch.float8_e4m3fn)))
