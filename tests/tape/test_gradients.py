"""Every operation of the tape against finite differences in float64, and its gradients bit for bit in all dtypes."""

import ml_dtypes
import numpy as np
import pytest
from choices import thorough
from hypothesis import given, settings
from hypothesis import strategies as st

import isograd as ig
import isograd.tape as tp
from isograd.elementwise import reference as elementwise
from isograd.errors import InvalidProblemError
from isograd.numerics.matmul import matmul
from isograd.numerics.reference import narrow, widen
from isograd.ops.softmax import reference as softmax
from isograd.reduction import reference as reduction
from isograd.tape import Tape, Variable, choice_rules, index_rules, rules

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
RNG = np.random.default_rng(0)


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def normal(*shape):
    return RNG.standard_normal(shape)


def positive(*shape):
    return RNG.uniform(0.5, 3, shape)


def away_from_zero(*shape):
    return RNG.uniform(0.3, 2, shape) * RNG.choice([-1.0, 1.0], shape)


MASK = np.array([[True, False, True, True], [False, False, True, False], [True, True, False, False]])

# name: (function of variables, operands)
CASES = {
    "add": (lambda a, b: a + b, [normal(3, 4), normal(3, 4)]),
    "add broadcast": (lambda a, b: tp.add(a, b), [normal(3, 1, 4), normal(2, 1)]),
    "add scalar": (lambda a: 2.5 + a + 1, [normal(3)]),
    "sub": (lambda a, b: a - b, [normal(3, 4), normal(4)]),
    "sub broadcast left": (lambda a, b: tp.sub(a, b), [normal(1, 4), normal(3, 4)]),
    "sub scalar": (lambda a: 1 - (a - 0.5), [normal(3)]),
    "mul": (lambda a, b: a * b, [normal(3, 4), normal(3, 4)]),
    "mul broadcast": (lambda a, b: tp.mul(a, b), [normal(2, 3, 1), normal(4)]),
    "mul scalar": (lambda a: 3 * a * 0.5, [normal(3)]),
    "mul rank 0": (lambda a, b: a * b, [normal(), normal(2, 3)]),
    "div": (lambda a, b: a / b, [normal(3, 4), away_from_zero(3, 4)]),
    "div broadcast": (lambda a, b: tp.div(a, b), [normal(4), away_from_zero(3, 1)]),
    "div scalar": (lambda a: 2 / (a / 3), [away_from_zero(3)]),
    "neg": (lambda a: -a, [normal(3)]),
    "neg function": (lambda a: tp.neg(a), [normal(3)]),
    "matmul": (lambda a, b: a @ b, [normal(3, 4), normal(4, 2)]),
    "matmul vectors": (lambda a, b: tp.matmul(a, b), [normal(4), normal(4)]),
    "matmul vector left": (lambda a, b: a @ b, [normal(4), normal(4, 3)]),
    "matmul vector right": (lambda a, b: a @ b, [normal(2, 3, 4), normal(4)]),
    "matmul vector and batch": (lambda a, b: a @ b, [normal(4), normal(2, 4, 3)]),
    "matmul batch": (lambda a, b: a @ b, [normal(2, 3, 4), normal(2, 4, 5)]),
    "matmul batch and matrix": (lambda a, b: a @ b, [normal(2, 3, 4), normal(4, 5)]),
    "matmul matrix and batch": (lambda a, b: a @ b, [normal(3, 4), normal(2, 4, 5)]),
    "matmul broadcast batches": (lambda a, b: a @ b, [normal(2, 1, 3, 4), normal(5, 4, 2)]),
    "exp": (lambda a: a.exp(), [normal(3, 4)]),
    "exp function": (lambda a: tp.exp(a), [normal(3)]),
    "log": (lambda a: a.log(), [positive(3, 4)]),
    "log function": (lambda a: tp.log(a), [positive(3)]),
    "sqrt": (lambda a: a.sqrt(), [positive(3, 4)]),
    "sqrt function": (lambda a: tp.sqrt(a), [positive(3)]),
    "relu": (lambda a: a.relu(), [away_from_zero(3, 4)]),
    "relu function": (lambda a: tp.relu(a), [away_from_zero(5)]),
    "silu": (lambda a: a.silu(), [normal(3, 4) * 3]),
    "silu function": (lambda a: tp.silu(a), [normal(3)]),
    "softmax": (lambda a: a.softmax(), [normal(3, 4)]),
    "softmax axis": (lambda a: tp.softmax(a, axis=0), [normal(3, 4)]),
    "log_softmax": (lambda a: a.log_softmax(), [normal(3, 4)]),
    "log_softmax axis": (lambda a: tp.log_softmax(a, axis=-2), [normal(2, 3, 4)]),
    "sum": (lambda a: a.sum(), [normal(3, 4)]),
    "sum axis": (lambda a: tp.sum(a, axis=-2), [normal(2, 3, 4)]),
    "sum axes": (lambda a: a.sum(axis=(0, 2), keepdims=True), [normal(2, 3, 4)]),
    "mean": (lambda a: a.mean(), [normal(3, 4)]),
    "mean axis": (lambda a: tp.mean(a, axis=1, keepdims=True), [normal(2, 3, 4)]),
    "mean axes": (lambda a: a.mean(axis=(0, -1)), [normal(2, 3, 4)]),
    "reshape": (lambda a: a.reshape(2, -1), [normal(3, 4)]),
    "reshape function": (lambda a: tp.reshape(a, (4, 3)), [normal(3, 4)]),
    "transpose": (lambda a: a.T, [normal(2, 3, 4)]),
    "transpose axes": (lambda a: a.transpose(2, 0, 1), [normal(2, 3, 4)]),
    "transpose function": (lambda a: tp.transpose(a, (-1, 0, 1)), [normal(2, 3, 4)]),
    "slice": (lambda a: a[..., 2:5], [normal(2, 3, 7)]),
    "slice with a step": (lambda a: a[:, 1::2, ::3], [normal(2, 5, 7)]),
    "slice backwards": (lambda a: a[::-2], [normal(5, 2)]),
    "index": (lambda a: a[1], [normal(3, 4)]),
    "index and new axis": (lambda a: tp.getitem(a, (-1, None, slice(0, 2))), [normal(3, 4)]),
    "index an element": (lambda a: a[2, 1], [normal(3, 4)]),
    "power": (lambda a, b: a**b, [positive(3, 4), normal(3, 4)]),
    "power broadcast": (lambda a, b: tp.power(a, b), [positive(3, 1), normal(4)]),
    "power of a number": (lambda a: 2**a, [normal(3)]),
    "power by a number": (lambda a: a**3 + a**-2 + a**0.5 + a**0 + a**2.5, [positive(3, 4)]),
    "power of negative values": (lambda a: a**2 * a**-1, [away_from_zero(3, 4)]),
    "tanh": (lambda a: a.tanh(), [normal(3, 4)]),
    "tanh function": (lambda a: tp.tanh(a), [normal(3)]),
    "sigmoid": (lambda a: a.sigmoid(), [normal(3, 4)]),
    "sigmoid function": (lambda a: tp.sigmoid(a), [normal(3)]),
    "gelu": (lambda a: a.gelu(), [normal(3, 4) * 2]),
    "gelu by tanh": (lambda a: tp.gelu(a, approximate="tanh"), [normal(3, 4) * 2]),
    "maximum": (lambda a, b: tp.maximum(a, b), [normal(3, 4), normal(3, 4)]),
    "maximum broadcast": (lambda a, b: tp.maximum(a, b), [normal(3, 4), normal(3, 1)]),
    "minimum": (lambda a, b: tp.minimum(a, b), [normal(3, 4), normal(4)]),
    "minimum with a number": (lambda a: tp.minimum(0.25, a), [normal(5)]),
    "where": (lambda a, b: tp.where(MASK, a, b), [normal(3, 4), normal(3, 4)]),
    "where broadcast": (lambda a, b: tp.where(MASK[0], a, b), [normal(3, 1), normal()]),
    "where a comparison": (lambda a: tp.where(a > 0, a * a, -a), [away_from_zero(3, 4)]),
    "max": (lambda a: a.max(), [normal(3, 4)]),
    "max axis": (lambda a: tp.max(a, axis=-2), [normal(2, 3, 4)]),
    "max axes": (lambda a: a.max(axis=(0, 2), keepdims=True), [normal(2, 3, 4)]),
    "min": (lambda a: tp.min(a), [normal(3, 4)]),
    "min axis": (lambda a: a.min(axis=1, keepdims=True), [normal(2, 3, 4)]),
    "index rows": (lambda a: a[[2, 0, 2, -1]], [normal(3, 4)]),
    "index rows by a matrix": (lambda a: a[np.array([[1, 1], [0, 2]])], [normal(3, 4)]),
    "index elements": (lambda a: a[[0, 2, 0], [1, 3, 1]], [normal(3, 4)]),
    "index mixed": (lambda a: a[:, [1, 1, 0], None, ::2], [normal(2, 3, 4)]),
    "index apart": (lambda a: a[[1, 0], ..., [2, 2]], [normal(2, 3, 4)]),
    "index by a mask": (lambda a: a[MASK], [normal(3, 4)]),
    "index by a mask of an axis": (lambda a: a[1, MASK[1]], [normal(3, 4)]),
    "index by a mask and an array": (lambda a: a[MASK[:, 0], [1]], [normal(3, 4)]),
    "concatenate": (lambda a, b, c: tp.concatenate([a, b, c], axis=1), [normal(2, 3), normal(2, 1), normal(2, 2)]),
    "concatenate last": (lambda a, b: tp.concatenate((b, a), axis=-1), [normal(2, 3), normal(2, 2)]),
    "concatenate one value twice": (lambda a: tp.concatenate([a, a]), [normal(2, 3)]),
    "used twice": (lambda a: a * a + a / (a * a + 1), [normal(3)]),
    "used twice, broadcast": (lambda a: a * a.T + a.sum(axis=0), [normal(3, 1)]),
    "a classifier": (
        lambda x, w, v: ((x @ w).silu() @ v).log_softmax()[:, 1].mean(),
        [normal(4, 3), normal(3, 5), normal(5, 3)],
    ),
}


def scalar_of(function, values, weights):
    tape = Tape()
    leaves = [tape.leaf(v) for v in values]
    out = function(*leaves)
    loss = (out * weights).sum()
    return tape, leaves, loss


def assert_gradients(function, values, tolerance=2e-8):
    """Compare with central differences of a fixed random combination of the outputs."""
    values = [np.array(v) for v in values]
    tape = Tape()
    weights = np.random.default_rng(1).uniform(0.5, 2, function(*map(tape.leaf, values)).shape)
    tape, leaves, loss = scalar_of(function, values, weights)
    gradients = tape.backward(loss)
    step = 2.0**-17
    for leaf, value in zip(leaves, values, strict=True):
        numeric = np.zeros(value.shape)
        for index in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                moved = value.copy()
                moved[index] += sign * step
                ends.append(scalar_of(function, [moved if v is value else v for v in values], weights)[2].item())
            numeric[index] = (ends[0] - ends[1]) / (2 * step)
        scale = 1 + np.abs(numeric).max()
        assert gradients[leaf].shape == value.shape
        assert np.abs(gradients[leaf] - numeric).max() <= tolerance * scale


# Kernels along another axis in float64; conformance tests compare their gradients in float32 with the reference.
EACH = [thorough(name) if name.endswith("softmax axis") else name for name in CASES]


@pytest.mark.parametrize("name", EACH)
def test_finite_differences(name):
    function, values = CASES[name]
    assert_gradients(function, values)


@pytest.mark.parametrize("name", EACH)
def test_finite_differences_through_a_checkpoint(name):
    function, values = CASES[name]
    assert_gradients(lambda *xs: xs[0].tape.checkpoint(function, *xs) * 2, values)


RULES = sorted({
    "add", "sub", "mul", "div", "neg", "matmul", "exp", "log", "sqrt", "relu", "sum", "mean",
    "reshape", "transpose", "getitem", "concatenate", "power", "tanh", "sigmoid", "maximum", "minimum", "where", "max",
    "min",
})  # fmt: skip
MODULES = (rules, choice_rules, index_rules)


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_gradient_is_noticed(name, monkeypatch):
    # Every operand's gradient in turn is made wrong by one part in a million.
    (module,) = [m for m in MODULES if name in vars(m)]
    right = getattr(module, name)
    function, values = CASES[name.replace("getitem", "slice")]
    for operand in range(len(values)):

        def wrong(*arrays, operand=operand, **options):
            y, gradients = right(*arrays, **options)
            changed = list(gradients)
            changed[operand] = lambda g: gradients[operand](g) * (1 + 1e-6)
            return y, tuple(changed)

        wrong.__name__ = name
        monkeypatch.setattr(module, name, wrong)
        with pytest.raises(AssertionError):
            assert_gradients(function, values)


def test_every_operation_has_a_case():
    defined = {
        name
        for module in MODULES
        for name, f in vars(module).items()
        if not name.startswith("_") and getattr(f, "__annotations__", {}).get("return") is rules.Result
    }
    assert defined == set(RULES)
    assert all(callable(getattr(tp, name)) for name in RULES)


# --- values and gradients in every dtype, bit for bit ---------------------------------------------------------------
def stored(x, dtype):
    return narrow(np.asarray(x), dtype)


def with_upstream(function, *values):
    """The value, the upstream gradient and the gradients of a function's operands."""
    tape = Tape()
    leaves = [tape.leaf(v) for v in values]
    out = function(*leaves)
    g = np.asarray(np.random.default_rng(2).standard_normal(out.shape)).astype(out.dtype)
    gradients = tape.backward(out, g)
    return out.value, g, *(gradients[leaf] for leaf in leaves)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_bits(dtype):
    a, b = normal(3, 4).astype(dtype), away_from_zero(3, 4).astype(dtype)
    wa, wb = widen(a), widen(b)
    y, g, da, db = with_upstream(lambda a, b: a + b, a, b)
    assert [bits(v) for v in (y, da, db)] == [bits(v) for v in (stored(wa + wb, dtype), g, g)]
    y, g, da, db = with_upstream(lambda a, b: a - b, a, b)
    assert [bits(v) for v in (y, da, db)] == [bits(v) for v in (stored(wa - wb, dtype), g, -g)]
    y, g, da, db = with_upstream(lambda a, b: a * b, a, b)
    w = widen(g)
    assert [bits(v) for v in (y, da, db)] == [bits(stored(v, dtype)) for v in (wa * wb, w * wb, w * wa)]
    y, g, da, db = with_upstream(lambda a, b: a / b, a, b)
    assert [bits(v) for v in (y, da, db)] == [bits(stored(v, dtype)) for v in (wa / wb, w / wb, -(w * (wa / wb)) / wb)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_gradients_are_order_free_sums(dtype):
    a, b = normal(2, 3, 4).astype(dtype), normal(3, 1).astype(dtype)
    _, g, da, db = with_upstream(lambda a, b: a * b, a, b)
    products = widen(g) * widen(a)
    assert bits(da) == bits(stored(widen(g) * widen(b), dtype))
    assert bits(db) == bits(stored(reduction.sum(products, (0, 2)).reshape(3, 1), dtype))
    _, g, db, da = with_upstream(lambda b, a: b - a, b, a)
    assert bits(db) == bits(stored(reduction.sum(widen(g), (0, 2)).reshape(3, 1), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_function_bits(dtype):
    x = positive(4, 5).astype(dtype)
    signed = (normal(4, 5) * 2).astype(dtype)
    w = widen(x)
    y, g, dx = with_upstream(lambda x: x.exp(), signed)
    assert bits(y) == bits(elementwise.exp(signed))
    assert bits(dx) == bits(stored(widen(g) * widen(y), dtype))
    y, g, dx = with_upstream(lambda x: x.log(), x)
    assert bits(y) == bits(elementwise.log(x))
    assert bits(dx) == bits(stored(widen(g) / w, dtype))
    y, g, dx = with_upstream(lambda x: x.sqrt(), x)
    assert bits(y) == bits(stored(np.sqrt(w), dtype))
    assert bits(dx) == bits(stored(widen(g) * w.dtype.type(0.5) / widen(y), dtype))
    y, g, dx = with_upstream(lambda x: x.relu(), signed)
    assert bits(y) == bits(np.maximum(signed, np.array(0, dtype)))
    assert bits(dx) == bits(np.where(signed > 0, g, np.array(0, dtype)))
    y, g, dx = with_upstream(lambda x: x.silu(), signed)
    assert bits(y) == bits(elementwise.silu(signed))
    assert bits(dx) == bits(elementwise.silu_backward(g, signed))
    for name in ("softmax", "log_softmax"):
        y, g, dx = with_upstream(lambda x, name=name: getattr(x, name)(axis=0), signed)
        assert bits(y) == bits(getattr(softmax, name)(signed, 0))
        assert bits(dx) == bits(getattr(softmax, f"{name}_backward")(g, y, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduction_bits(dtype):
    x = normal(3, 4, 5).astype(dtype)
    y, g, dx = with_upstream(lambda x: x.sum(axis=(0, 2)), x)
    assert bits(y) == bits(reduction.sum(x, (0, 2)))
    assert bits(dx) == bits(np.broadcast_to(g[None, :, None], x.shape))
    y, g, dx = with_upstream(lambda x: x.mean(axis=1, keepdims=True), x)
    assert bits(y) == bits(reduction.mean(x, 1, True))
    share = stored(widen(g) / widen(g).dtype.type(4), dtype)
    assert bits(dx) == bits(np.broadcast_to(share, x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_bits(dtype):
    a, b = normal(2, 3, 4).astype(dtype), normal(4, 5).astype(dtype)
    y, g, da, db = with_upstream(lambda a, b: a @ b, a, b)
    assert bits(y) == bits(matmul(a, b))
    assert bits(da) == bits(matmul(g, b.T))
    # The broadcast batch is part of the contraction, so the gradient is rounded once.
    assert bits(db) == bits(matmul(a.reshape(6, 4).T, g.reshape(6, 5)))


def test_the_precision_of_a_product_is_that_of_its_gradients():
    a, b = normal(3, 40).astype(np.float32), normal(40, 5).astype(np.float32)
    y, g, da, db = with_upstream(lambda a, b: ig.matmul(a, b, precision="int16"), a, b)
    assert bits(y) == bits(ig.matmul(a, b, precision="int16")) == bits(matmul(a, b, "int16")) != bits(matmul(a, b))
    assert bits(da) == bits(matmul(g, b.T, "int16"))
    assert bits(db) == bits(matmul(a.T, g, "int16"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_broadcasting_of_any_shapes(data):
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    shapes = []
    for _ in range(2):
        kept = data.draw(st.integers(0, len(shape)))
        shapes.append([n if data.draw(st.booleans()) else 1 for n in shape[len(shape) - kept :]])
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    a, b = (np.asarray(rng.standard_normal(s)).astype(np.float32) for s in shapes)
    y, g, da, db = with_upstream(lambda a, b: a * b, a, b)
    assert bits(y) == bits(np.asarray(a * b))
    for gradient, operand, other in ((da, a, b), (db, b, a)):
        terms = np.asarray(g * other)
        full = np.broadcast_shapes(a.shape, b.shape)
        padded = (1,) * (len(full) - operand.ndim) + operand.shape
        axes = tuple(d for d, (n, m) in enumerate(zip(full, padded, strict=True)) if m == 1 and n != 1)
        assert bits(gradient) == bits(reduction.sum(terms, axes, True).reshape(operand.shape))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_basic_indices(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    index = []
    for n in shape[: data.draw(st.integers(0, len(shape)))]:
        index.extend([None] * data.draw(st.integers(0, 1)))
        index.append(data.draw(st.one_of(st.integers(-n, n - 1), st.slices(n))))
    if data.draw(st.booleans()):
        index.append(Ellipsis)
    x = np.arange(float(np.prod(shape))).reshape(shape)
    y, g, dx = with_upstream(lambda x: x[tuple(index)], x)
    assert bits(y) == bits(np.asarray(x[tuple(index)]))
    expected = np.zeros(shape)
    expected[tuple(index)] = g
    assert bits(dx) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nans_are_canonical(dtype):
    integer = f"u{np.dtype(dtype).itemsize}"
    odd = np.array(np.nan, dtype).view(integer) | 1 | np.array(-0.0, dtype).view(integer)
    x = np.array([odd, np.array(1, dtype).view(integer)], integer).view(dtype)
    canonical = np.array(np.nan, dtype).tobytes()

    def check(y):
        y = np.asarray(y)
        assert np.isnan(y).any()
        assert all(v.tobytes() == canonical for v in y.reshape(-1) if np.isnan(v))

    functions = [
        lambda v: v + 1, lambda v: 1 - v, lambda v: v * v, lambda v: v / v, lambda v: -v, lambda v: v[::-1],
        lambda v: v.reshape(1, 2).T, lambda v: tp.concatenate([v, v]), lambda v: v.relu(), lambda v: v.sqrt(),
        lambda v: v.exp(), lambda v: v.log(), lambda v: v.silu(), lambda v: v.sum(), lambda v: v.mean(),
        lambda v: v @ v, lambda v: v.softmax(), lambda v: v.log_softmax(), lambda v: v * x, lambda v: x - v,
        lambda v: v.tanh(), lambda v: v.sigmoid(), lambda v: v.gelu(), lambda v: v.gelu("tanh"), lambda v: v**2,
        lambda v: v**0.5, lambda v: 2**v, lambda v: v**v, lambda v: v.max(), lambda v: v.min(), lambda v: v[[0, 0]],
        lambda v: tp.maximum(v, x[::-1]), lambda v: tp.minimum(x, v), lambda v: tp.where(v == v, 1, v),
    ]  # fmt: skip
    for function in functions:
        tape = Tape()
        leaf = tape.leaf(x)
        out = function(leaf)
        check(out.value)
        check(tape.backward(out, np.full(out.shape, odd, integer).view(dtype))[leaf])
    check(Tape().leaf(x).value)


def test_special_values_of_gradients():
    x = np.array([0.0, -0.0, np.nan, 4.0])
    assert bits(with_upstream(lambda v: v.relu(), x)[0]) == bits(np.array([0.0, 0.0, np.nan, 4.0]))
    tape = Tape()
    leaf = tape.leaf(x)
    assert bits(tape.backward(leaf.relu().sum())[leaf]) == bits(np.array([0.0, 0.0, 1.0, 1.0]))
    leaf = tape.leaf(np.array([0.0, 4.0]))
    assert bits(tape.backward(leaf.sqrt().sum())[leaf]) == bits(np.array([np.inf, 0.25]))


def test_shape_errors():
    tape = Tape()
    x = tape.leaf(np.ones((2, 3)))
    y = tape.leaf(np.ones((2, 4)))
    for function, words in (
        (lambda: x + y, r"add: the shapes \(2, 3\) and \(2, 4\) do not broadcast"),
        (lambda: x - y, r"sub: "),
        (lambda: x * y, r"mul: "),
        (lambda: x / y, r"div: "),
        (lambda: x @ y, r"matmul: a has shape \(2, 3\) and b \(2, 4\)"),
        (lambda: x.reshape(5), r"reshape: shape \(2, 3\) cannot become \(5,\)"),
        (lambda: x.transpose(0, 0), r"transpose: axes are \(0, 0\); expected a permutation"),
        (lambda: x.sum(axis=2), r"sum: axis 2 is out of range"),
        (lambda: x.softmax(axis=2), r"softmax: "),
        (lambda: tp.concatenate([x, y], axis=0), r"concatenate: the shapes .* differ in more than axis 0"),
        (lambda: tp.concatenate([x, x], axis=2), r"concatenate: axis 2 is out of range"),
        (lambda: tp.concatenate([x, x[0]]), r"concatenate: the shapes"),
        (lambda: tp.concatenate([]), r"concatenate: expected a sequence"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            function()
    assert isinstance(x, Variable)
