"""The functions: NumPy's and torch's meaning, every kind of array, recordings, and the gradients of the tape."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
import isograd.tape as tp
from isograd.gather import reference as ref

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
RNG = np.random.default_rng(70)


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def normal(*shape, dtype=np.float64):
    return RNG.standard_normal(shape).astype(dtype)


# --- what NumPy and torch mean ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "indices", "axis"),
    [
        ((3, 4), (3, 6), 1),
        ((3, 4), (6, 4), 0),
        ((3, 4), (1, 6), 1),
        ((1, 4), (3, 6), -1),
        ((2, 1, 5, 3), (1, 4, 2, 3), 2),
        ((2, 3, 1), (1, 9, 7), 1),
        ((5,), (0,), 0),
    ],
)
def test_take_along_axis_broadcasts_as_in_numpy(x, indices, axis):
    values = normal(*x)
    places = RNG.integers(-x[axis], x[axis], indices)
    v = ig.take_along_axis(values, places, axis)
    assert bits(v) == bits(np.take_along_axis(values, places, axis))

    # The gradient has x's shape: where x was broadcast it is a sum over that dimension too.
    dv = np.rint(8 * normal(*v.shape))
    expected = np.zeros(np.broadcast_shapes(x, tuple(1 if d == axis % len(x) else n for d, n in enumerate(v.shape))))
    full = np.broadcast_to(places, v.shape)
    grid = list(np.indices(v.shape))
    grid[axis % len(x)] = full % x[axis]
    np.add.at(expected, tuple(grid), dv)
    repeated = tuple(d for d in range(len(x)) if x[d] == 1 and expected.shape[d] != 1)
    dx = ig.take_along_axis_backward(dv, places, x, axis)
    assert bits(dx) == bits(expected.sum(axis=repeated, keepdims=True) + 0.0)


def test_scatter_sum_broadcasts_and_takes_whole_slices():
    x = np.rint(9 * normal(4, 5, 3))
    places, values = np.array([0, -1, 0, 2]), np.rint(9 * normal(4, 4, 3))
    expected = x.copy()
    np.add.at(expected, (slice(None), places), values)
    before = x.copy()
    assert bits(ig.scatter_sum(x, places, values, 1)) == bits(expected)
    wide = places.reshape(1, 4, 1)
    assert bits(ig.scatter_sum(x, wide, values, 1)) == bits(expected)
    assert bits(ig.scatter_sum(x, np.broadcast_to(wide, (4, 4, 3)), values, -2)) == bits(expected)
    assert bits(x) == bits(before)
    one = np.ones((1, 1, 1))
    assert ig.scatter_sum(x, wide, one, 1).sum() == x.sum() + 48
    line = np.zeros(3)
    assert ig.scatter_sum(line, np.array([1, 1]), np.array([2.0, 3.0])).tolist() == [0, 5, 0]


def test_segment_sum_and_embedding():
    ids = np.array([[2, 0, 2], [2, 1, 0]])
    values = np.rint(9 * normal(2, 3, 4))
    expected = np.zeros((5, 4))
    np.add.at(expected, ids, values)
    assert bits(ig.segment_sum(values, ids, 5)) == bits(expected)
    assert bits(ig.segment_sum(values, ids - 5, 5)) == bits(expected)
    assert bits(ig.segment_sum(values[:, 0].T.copy().T, ids[:, 0], 5)) == bits(
        ig.segment_sum(values[:, 0], ids[:, 0], 5)
    )
    assert bits(ig.embedding_backward(values, ids.astype(np.uint32), 5)) == bits(expected)
    expected[2] = 0
    for padding in (2, -3):
        assert bits(ig.embedding_backward(values, ids, 5, padding)) == bits(expected)
    weight = normal(5, 4)
    assert bits(ig.embedding(weight, ids, 2)) == bits(weight[ids])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_agrees(name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-8, 9, (4, 6, 5), generator=generator).to(dtype)
    values = torch.randint(-8, 9, (4, 9, 5), generator=generator).to(dtype)
    indices = torch.randint(0, 6, (4, 9, 5), generator=generator)
    line = indices[0, :, 0].contiguous()
    table, tokens = x.flatten(1), line % 4
    # Small integers: every order of additions is exact.
    pairs = {
        "gather": (ig.take_along_axis(x, indices, 1), torch.gather(x, 1, indices)),
        "scatter_add": (ig.scatter_sum(x, indices, values, 1), x.scatter_add(1, indices, values)),
        "index_add": (ig.scatter_sum(x, line, values, 1), x.index_add(1, line, values)),
        "embedding": (ig.embedding(table, tokens), torch.nn.functional.embedding(tokens, table)),
        "backward": (
            ig.take_along_axis_backward(values, indices, (4, 6, 5), 1),
            torch.zeros_like(x).scatter_add(1, indices, values),
        ),
    }  # fmt: skip
    for key, (ours, theirs) in pairs.items():
        assert ours.dtype == dtype, key
        assert torch.equal(ours, theirs), key
    # A view of any strides, and an expanded gradient.
    turned = ig.take_along_axis(x.transpose(0, 2), indices.transpose(0, 2), 1)
    assert torch.equal(turned.transpose(0, 2), pairs["gather"][0])
    ones = torch.ones((), dtype=dtype).expand(4, 9, 5)
    dx = ig.take_along_axis_backward(ones, indices, (4, 6, 5), 1)
    assert torch.equal(dx, torch.zeros_like(x).scatter_add(1, indices, ones.contiguous()))


class FromElsewhere:
    """An array of another library, with DLPack and a namespace."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        class Space:
            from_dlpack = FromElsewhere

        return Space


def test_arrays_with_dlpack_come_back_as_their_own_kind():
    x, indices = normal(3, 4), RNG.integers(0, 4, (3, 2))
    v = ig.take_along_axis(FromElsewhere(x), FromElsewhere(indices))
    assert isinstance(v, FromElsewhere)
    assert bits(v.array) == bits(np.take_along_axis(x, indices, -1))
    assert isinstance(ig.segment_sum(FromElsewhere(x), np.array([0, 1, 1]), 2), FromElsewhere)
    assert isinstance(ig.take_along_axis(x, FromElsewhere(indices)), np.ndarray)


def test_a_recording_holds_the_functions():
    x, indices = normal(3, 4), RNG.integers(0, 4, (3, 6))
    line = np.array([0, 2, 2])
    with ig.Encoder() as encoder:
        v = ig.take_along_axis(x, indices)
        dx = ig.take_along_axis_backward(v, indices, (3, 4))
        rows = ig.scatter_sum(dx, line, x, 0)
    assert len(encoder) == 3

    def expected():
        taken = np.take_along_axis(x, indices, 1)
        scattered = ref.take_along_axis_backward(taken, indices, (3, 4))
        return bits(ref.index_sum((3, 4), line, x, scattered))

    assert bits(rows.result()) == expected()
    x[...] = normal(3, 4)
    encoder.replay()
    assert bits(rows.result()) == expected()


def test_a_recording_of_tensors():
    torch = pytest.importorskip("torch")
    x, indices = torch.randn(3, 1, 4), torch.randint(0, 4, (3, 2, 6))
    with ig.Encoder():
        v = ig.take_along_axis(x, indices)
        with pytest.raises(ig.RecordingError):
            v.sum()
        rows = ig.scatter_sum(x, torch.tensor([1, 1]), x[:2], 0)
    assert torch.equal(v, torch.gather(x.expand(3, 2, 4), 2, indices))
    assert rows.shape == x.shape
    with ig.Encoder(), pytest.raises(ig.UnsupportedError, match="copy"):
        ig.take_along_axis_backward(v.transpose(1, 2).contiguous().transpose(1, 2), indices, (3, 1, 4))


# --- the tape --------------------------------------------------------------------------------------------------------
INDICES = np.array([[0, 2, 2, -1, 0], [3, 3, 3, 3, 1], [1, 0, -4, 2, 2]])
SLICES = np.array([2, 0, 2, -1])
CASES = {
    "take_along_axis": (lambda x: ig.take_along_axis(x, INDICES, 1), [normal(3, 4)]),
    "take_along_axis broadcast": (lambda x: ig.take_along_axis(x, INDICES), [normal(1, 4)]),
    "take_along_axis first axis": (lambda x: tp.take_along_axis(x, INDICES.T, 0), [normal(4, 3)]),
    "embedding": (lambda w: ig.embedding(w, INDICES % 4), [normal(4, 2, 3)]),
    "scatter_sum": (lambda x, v: ig.scatter_sum(x, INDICES, v, 1), [normal(3, 4), normal(3, 5)]),
    "scatter_sum slices": (lambda x, v: ig.scatter_sum(x, SLICES, v, 1), [normal(2, 3, 2), normal(2, 4, 2)]),
    "scatter_sum broadcast": (lambda x, v: ig.scatter_sum(x, INDICES, v, 1), [normal(3, 4), normal(1, 5)]),
    "scatter_sum constant": (lambda v: ig.scatter_sum(np.ones((3, 4)), INDICES, v, 1), [normal(3, 5)]),
    "segment_sum": (lambda v: ig.segment_sum(v, INDICES, 4), [normal(3, 5, 2)]),
    "segment_sum one": (lambda v: tp.segment_sum(v, SLICES, 5), [normal(4)]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_against_finite_differences(name):
    function, operands = CASES[name]
    tape = tp.Tape()
    leaves = [tape.leaf(a) for a in operands]
    y = function(*leaves)
    weights = normal(*y.shape)
    gradients = tape.backward((y * weights).sum())

    def loss(arrays):
        fresh = tp.Tape()
        return float((function(*[fresh.leaf(a) for a in arrays]).value * weights).sum())

    for position, leaf in enumerate(leaves):
        expected = np.zeros(leaf.shape)
        for place in np.ndindex(leaf.shape):
            step = [np.array(a) for a in operands]
            step[position][place] += 1e-3
            up = loss(step)
            step[position][place] -= 2e-3
            expected[place] = (up - loss(step)) / 2e-3
        np.testing.assert_allclose(gradients[leaf], expected, rtol=1e-8, atol=1e-8)


@each_dtype
def test_gradients_bit_for_bit(dtype):
    x, values, g = normal(3, 4, dtype=dtype), normal(3, 5, dtype=dtype), normal(3, 5, dtype=dtype)
    tape = tp.Tape()
    a = tape.leaf(x)
    gradients = tape.backward((ig.take_along_axis(a, INDICES, 1) * g).sum())
    assert bits(gradients[a]) == bits(ref.take_along_axis_backward(g, INDICES, (3, 4), 1))

    tape = tp.Tape()
    a, b = tape.leaf(x), tape.leaf(values)
    y = ig.scatter_sum(a, INDICES, b, 1)
    assert bits(y.value) == bits(ref.scatter_sum((3, 4), INDICES, values, 1, x))
    gradients = tape.backward((y * x).sum())
    assert bits(gradients[a]) == bits(x)
    assert bits(gradients[b]) == bits(ref.take_along_axis(x, INDICES, 1))

    tape = tp.Tape()
    w, tokens = tape.leaf(x), np.array([2, 0, 2])
    y = ig.embedding(w, tokens, padding_idx=0)
    tokens[:] = 1  # the gradient is that of the indices as they were
    gradients = tape.backward((y * x).sum())
    assert bits(gradients[w]) == bits(ref.index_sum((3, 4), np.array([2, 0, 2]), x, skipped=0))


def test_the_tape_passes_errors_on():
    x = tp.Tape().leaf(normal(3, 4))
    with pytest.raises(ig.IndexOutOfRangeError, match=r"take_along_axis: indices\[0, 0\] is 4"):
        ig.take_along_axis(x, np.full((3, 1), 4))
    with pytest.raises(ig.InvalidProblemError, match="indices is list"):
        ig.take_along_axis(x, [[0]])
    with pytest.raises(ig.InvalidProblemError, match="scatter_sum: a variable is float64"):
        ig.scatter_sum(x, np.zeros((3, 1), int), np.ones((3, 1), np.float32))
