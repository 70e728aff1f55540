"""Maxima, masks, comparisons and indices on the tape: values, ties, signs of zeros, NaN, and order-free gradients."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
import isograd.tape as tp
from isograd.errors import InvalidProblemError, MissingGradientError, UnsupportedError
from isograd.numerics.reference import narrow, widen
from isograd.reduction import reference as reduction

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
F32 = np.float32
NAN = np.nan


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def gradient(function, *arrays):
    """The gradients of the sum of function(leaves)."""
    tape = ig.Tape()
    leaves = [tape.leaf(np.asarray(a)) for a in arrays]
    gradients = tape.backward(function(*leaves).sum())
    return [gradients[leaf].tolist() for leaf in leaves]


# --- maxima ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_of_special_values(dtype):
    a = np.array([1, NAN, 2, NAN, 0.0, -0.0, -0.0, np.inf, -3], dtype)
    b = np.array([2, 1, NAN, NAN, -0.0, 0.0, -0.0, 1, -3], dtype)
    assert bits(ig.maximum(a, b)) == bits(np.array([2, NAN, NAN, NAN, 0.0, 0.0, -0.0, np.inf, -3], dtype))
    assert bits(ig.minimum(a, b)) == bits(np.array([1, NAN, NAN, NAN, -0.0, -0.0, -0.0, 1, -3], dtype))
    for order in ([0.0, -0.0], [-0.0, 0.0]):
        x = np.array(order, dtype)
        assert bits(ig.max(x)) == bits(np.array(0.0, dtype))
        assert bits(ig.min(x)) == bits(np.array(-0.0, dtype))
    assert bits(ig.max(a)) == bits(np.array(NAN, dtype))
    assert bits(ig.min(a[4:])) == bits(np.array(-3, dtype))
    assert bits(ig.max(a[4:].reshape(1, 5), axis=-1, keepdims=True)) == bits(np.array([[np.inf]], dtype))


def test_equal_elements_share_the_gradient():
    a, b = np.array([1.0, 2, 3, NAN, NAN, 0.0]), np.array([1.0, 3, 2, 1, NAN, -0.0])
    assert gradient(tp.maximum, a, b) == [[0.5, 0, 1, 1, 0.5, 0.5], [0.5, 1, 0, 0, 0.5, 0.5]]
    assert gradient(tp.minimum, a, b) == [[0.5, 1, 0, 1, 0.5, 0.5], [0.5, 0, 1, 0, 0.5, 0.5]]
    x = np.array([[3.0, 1, 3], [NAN, 2, 2], [0.0, -0.0, 0.0]])
    third = 1 / 3
    assert gradient(lambda v: v.max(axis=1), x) == [[[0.5, 0, 0.5], [1, 0, 0], [third, third, third]]]
    assert gradient(lambda v: v.min(axis=1), x) == [[[0, 1, 0], [1, 0, 0], [third, third, third]]]
    assert gradient(lambda v: v.max(), np.ones((2, 2))) == [[[0.25, 0.25], [0.25, 0.25]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_broadcast_operands_are_order_free_sums(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 3)).astype(dtype), rng.standard_normal(3).astype(dtype)
    a[a == b] = 5  # no ties here
    g = rng.standard_normal((40, 3)).astype(dtype)
    zero = widen(g).dtype.type(0)
    for function, ahead in ((tp.maximum, b > a), (tp.minimum, b < a), (lambda a, b: tp.where(a >= b, a, b), b > a)):
        tape = ig.Tape()
        x, y = tape.leaf(a), tape.leaf(b)
        gradients = tape.backward(function(x, y), g)
        terms = np.where(ahead, widen(g), zero)
        assert bits(gradients[y]) == bits(narrow(reduction.sum(terms, 0), dtype))
        assert bits(gradients[x]) == bits(np.where(ahead, np.array(0, dtype), g))


def test_maxima_that_are_refused():
    x = np.ones((2, 0), F32)
    with pytest.raises(InvalidProblemError, match=r"max: shape \(2, 0\) has no elements along axis 1"):
        ig.max(x, axis=1)
    assert ig.min(x, axis=0).shape == (0,)
    with pytest.raises(InvalidProblemError, match="min: axis 2 is out of range"):
        ig.min(x, axis=2)
    with pytest.raises(InvalidProblemError, match=r"maximum: the shapes \(2, 0\) and \(3,\) do not broadcast"):
        ig.maximum(x, np.ones(3, F32))
    with pytest.raises(InvalidProblemError, match=r"where: the shapes \(2,\), \(3,\) and \(\) do not broadcast"):
        ig.where(np.ones(2, bool), np.ones(3, F32), 0.0)
    with pytest.raises(UnsupportedError, match="where: mask has dtype float32; accepted: bool"):
        ig.where(np.ones(2, F32), np.ones(2, F32), 0.0)


# --- comparisons -----------------------------------------------------------------------------------------------------
def test_comparisons_are_masks():
    a, b = np.array([1.0, 2, NAN, 0.0], F32), np.array([1.0, 3, NAN, -0.0], F32)
    x = ig.Tape().leaf(a)
    for name, function in {
        "equal": lambda p, q: p == q, "not_equal": lambda p, q: p != q, "less": lambda p, q: p < q,
        "less_equal": lambda p, q: p <= q, "greater": lambda p, q: p > q, "greater_equal": lambda p, q: p >= q,
    }.items():  # fmt: skip
        expected = getattr(np, name)(a, b)
        for mask in (function(x, b), getattr(ig, name)(x, b), getattr(ig, name)(a, b), function(x, ig.Tape().leaf(b))):
            assert bits(mask) == bits(expected)
        assert bits(function(b, x)) == bits(getattr(np, name)(b, a))
        assert bits(function(x, 1)) == bits(getattr(np, name)(a, F32(1)))
        assert bits(function(1.5, x)) == bits(getattr(np, name)(F32(1.5), a))
    half = ig.Tape().leaf(np.array([0.1], np.float16))
    assert (half == 0.1).all()  # a Python number takes the dtype, as elsewhere
    for wrong, words in (
        (lambda: x < np.ones(4), "less: a variable is float32 and the other operand float64"),
        (lambda: x == np.ones(3, F32), r"equal: the shapes \(4,\) and \(3,\) do not broadcast"),
        (lambda: ig.less(1, 2), "less: got int, int; expected at least one variable or array"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            wrong()


def test_variables_are_keys():
    tape = ig.Tape()
    leaves = [tape.leaf(np.ones(3, F32)) for _ in range(200)]
    places = {leaf: i for i, leaf in enumerate(leaves)}
    assert [places[leaf] for leaf in leaves] == list(range(200))
    assert len({*leaves, *leaves}) == 200
    assert leaves[0] * 1 not in places
    assert (leaves[0] == None) is False  # noqa: E711
    assert leaves[0] != "x"


# --- indices ---------------------------------------------------------------------------------------------------------
INDICES = {
    "rows": ([3, 0, 3, -1],),
    "a matrix of rows": (np.array([[1, 1], [0, 2]], np.uint8),),
    "no rows": ([],),
    "elements": ([0, 3, 0], [1, 2, 1]),
    "mixed": (slice(None, None, 2), [1, 1, 0]),
    "apart": ([1, 0], None, ..., [3, 3]),
    "a mask": (np.arange(60).reshape(4, 3, 5) % 7 == 0,),
    "a mask of rows": (np.array([True, False, True, True]),),
    "a mask and an array": (np.array([True, False, True, True]), [2, 0, 2]),
    "an integer and an array": (1, ..., [4, 4]),
    "new axes": (None, [0, 0], None, 1),
    "nothing": (np.zeros((4, 3, 5), bool),),
    "rank 0": (np.array(2), ...),
}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("name", INDICES)
def test_indices(name, dtype):
    index = INDICES[name]
    rng = np.random.default_rng(1)
    a = rng.standard_normal((4, 3, 5)).astype(dtype)
    tape = ig.Tape()
    x = tape.leaf(a)
    part = x[index[0]] if len(index) == 1 else x[index]
    assert bits(part.value) == bits(np.asarray(a[index]))
    g = np.asarray(rng.standard_normal(part.shape)).astype(dtype)
    got = tape.backward(part, g)[x]
    # Each element's sum on its own, by the reference.
    positions = np.asarray(np.arange(60).reshape(4, 3, 5)[index]).reshape(-1)
    expected = np.zeros(60, dtype)
    for place in set(positions.tolist()):
        expected[place] = reduction.sum(g.reshape(-1)[positions == place])
    assert bits(got) == bits(expected.reshape(4, 3, 5))


def test_the_order_of_the_indices_leaves_no_trace():
    rng = np.random.default_rng(2)
    rows, columns = rng.integers(0, 4, 3000), rng.integers(0, 3, 3000)
    g = np.ldexp(rng.standard_normal(3000), rng.integers(-20, 20, 3000)).astype(F32)
    order = rng.permutation(3000)
    results = []
    for chosen in (np.arange(3000), order):
        tape = ig.Tape()
        x = tape.leaf(np.ones((4, 3), F32))
        results.append(bits(tape.backward(x[rows[chosen], columns[chosen]], g[chosen])[x]))
    assert results[0] == results[1]


def test_indices_and_masks_may_change_after_they_were_used():
    tape = ig.Tape()
    x = tape.leaf(np.arange(4.0))
    index, mask = np.array([0, 0, 3]), np.array([True, False, True, False])
    out = x[index].sum() + x[mask].sum() * 10 + tp.where(mask, x, 0).sum() * 100
    index[:], mask[:] = 1, True
    assert tape.backward(out)[x].tolist() == [112, 0, 110, 1]


# --- what has no gradient --------------------------------------------------------------------------------------------
def test_a_missing_gradient_says_why():
    tape, other = ig.Tape(), ig.Tape()
    w = tape.leaf(np.ones((100, 10), F32))
    y = w * 2
    gradients = tape.backward(y.sum())
    later, stranger = tape.leaf(np.ones(3)), other.leaf(np.ones(2, np.float16))
    for key, words in (
        (y, "no gradient for a variable of float32 (100, 10): it was computed by an operation"),
        (later, "no gradient for a variable of float64 (3,): backward was called before the leaf was made"),
        (stranger, "no gradient for a variable of float16 (2,): it belongs to another tape"),
        ("w", "a key is a str; expected a leaf of the tape"),
    ):
        with pytest.raises(KeyError) as caught:
            gradients[key]
        assert isinstance(caught.value, MissingGradientError)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 200
        assert gradients.get(key) is None
        assert key not in gradients
    assert gradients.get(w) is gradients[w]


# --- arrays and variables alike --------------------------------------------------------------------------------------
def test_functions_of_arrays_have_the_bits_of_the_tape():
    x = np.random.default_rng(3).uniform(0.1, 3, (3, 4)).astype(F32)
    v = ig.Tape().leaf(x)
    for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "relu", "silu", "gelu", "sum", "mean", "max", "min"):
        function = getattr(ig, name)
        assert type(function(x)) is np.ndarray
        assert bits(function(x)) == bits(function(v).value) == bits(getattr(tp, name)(v).value)
    for name, other in (("power", 2.5), ("power", x), ("maximum", 1.0), ("minimum", x[0])):
        function = getattr(ig, name)
        assert bits(function(x, other)) == bits(function(v, other).value)
        assert isinstance(function(other, v), ig.Variable)
    assert bits(ig.power(x, 1 / 3)) == bits((v ** (1 / 3)).value)
    assert bits(ig.where(x > 1, x, 0.0)) == bits(ig.where(v > 1, v, 0.0).value)
    assert x.flags.writeable


def test_functions_of_arrays_that_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedError, match="tanh: an operand is a torch tensor; accepted: NumPy arrays"):
        ig.tanh(torch.ones(2))
    with pytest.raises(InvalidProblemError, match="sigmoid: got list; expected at least one variable or array"):
        ig.sigmoid([1.0])
    with pytest.raises(UnsupportedError, match="relu: an operand has dtype int64"):
        ig.relu(np.ones(2, np.int64))
    with ig.Encoder(), pytest.raises(UnsupportedError, match="exp: it is computed at once, which a recording cannot"):
        ig.exp(np.ones(2, F32))


# --- torch -----------------------------------------------------------------------------------------------------------
TIES = np.array([[3.0, 1, 3, -2], [0.5, 0.5, 0.5, 0.25], [-1, 2, 0.0, 2]])
LIKE_TORCH = {
    "max": (lambda x: tp.max(x, axis=1), lambda x, torch: x.amax(1)),
    "min": (lambda x: x.min(), lambda x, torch: x.amin()),
    "maximum": (lambda x: tp.maximum(x, x[::-1]), lambda x, torch: torch.maximum(x, x.flip(0))),
    "where": (lambda x: tp.where(x > 0.25, x * x, -x), lambda x, torch: torch.where(x > 0.25, x * x, -x)),
    "power": (lambda x: x**2 + x**0 + x**3, lambda x, torch: x**2 + x**0 + x**3),
    "exponent": (lambda x: tp.maximum(x, 0.0) ** (x * x), lambda x, torch: torch.clamp_min(x, 0) ** (x * x)),
    "tanh": (lambda x: x.tanh(), lambda x, torch: x.tanh()),
    "sigmoid": (lambda x: x.sigmoid(), lambda x, torch: x.sigmoid()),
    "gelu": (lambda x: x.gelu(), lambda x, torch: torch.nn.functional.gelu(x)),
    "gelu by tanh": (lambda x: x.gelu("tanh"), lambda x, torch: torch.nn.functional.gelu(x, approximate="tanh")),
    "rows": (lambda x: x[[0, 2, 0]], lambda x, torch: x[[0, 2, 0]]),
    "mask": (lambda x: x[x > 0.25], lambda x, torch: x[x > 0.25]),
    "mixed": (lambda x: x[1:, [0, 0, 3]], lambda x, torch: x[1:, [0, 0, 3]]),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_gradients_of_torch(name):
    torch = pytest.importorskip("torch")
    ours, theirs = LIKE_TORCH[name]
    tape, y = ig.Tape(), torch.tensor(TIES, requires_grad=True)
    x = tape.leaf(TIES)
    out, expected = ours(x), theirs(y, torch)
    g = np.random.default_rng(4).standard_normal(out.shape)
    expected.backward(torch.tensor(g))
    np.testing.assert_allclose(out.value, expected.detach().numpy(), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(tape.backward(out, np.asarray(g))[x], y.grad.numpy(), rtol=1e-12, atol=1e-15)
