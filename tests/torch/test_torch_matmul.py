"""igt.matmul and igt.linear: bits against the NumPy product and the tape, gradients, transforms."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.tape as tp
import isograd.torch as igt
from isograd.core import arrays
from isograd.numerics import int16
from isograd.numerics.matmul import matmul
from isograd.reduction import api as reduction
from isograd.torch import grouped
from isograd.torch.ops_grouped import GROUPED_MATMUL, GROUPED_OUTER
from isograd.torch.ops_matmul import ADD_TO_ROWS, MATMUL, SUM_OF_ROWS

BFLOAT16 = ml_dtypes.bfloat16
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(shape, generator=GENERATOR).to(dtype).requires_grad_(grad)


def numpy(tensor):
    return arrays.numpy_view(tensor.detach())


def bits(x):
    x = numpy(x) if isinstance(x, torch.Tensor) else x
    return x.dtype, x.shape, np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 40), (40, 5)), ((40,), (40, 5)), ((3, 40), (40,)), ((40,), (40,)), ((2, 3, 40), (40, 5)),
        ((2, 1, 3, 40), (4, 40, 5)), ((3, 40), (2, 40, 5)), ((0, 40), (40, 5)), ((3, 0), (0, 5)), ((2, 0, 4), (4, 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, None), (torch.float32, "int16")])
def test_bits_and_gradients_are_the_tapes(a, b, dtype, precision):
    x, w = normal(*a, dtype=dtype), normal(*b, dtype=dtype)
    y = igt.matmul(x, w, precision=precision)
    assert y.shape == torch.matmul(x, w).shape
    g = normal(*y.shape, dtype=dtype, grad=False)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    tape = tp.Tape()
    u, v = tape.leaf(numpy(x)), tape.leaf(numpy(w))
    z = tp.matmul(u, v, precision=precision)
    expected = tape.backward(tp.sum(z * numpy(g)))
    assert bits(y) == bits(z.value)
    assert bits(dx) == bits(expected[u])
    assert bits(dw) == bits(expected[v])


def layer(dtype):
    return normal(2, 9, 70, dtype=dtype), normal(30, 70, dtype=dtype), normal(30, dtype=dtype)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, None), (torch.float32, "int16")])
def test_a_linear_layer_is_balanced(dtype, precision):
    x, w, b = layer(dtype)
    with torch.no_grad():
        w[:, 3] *= 2.0**-12
        x[..., 3] *= 2.0**12
        x[0, 4] = 0
    y = igt.linear(x, w, b, precision=precision)
    g = normal(*y.shape, dtype=dtype, grad=False)
    g[1, 2] *= 2.0**-10
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    rows, weight, upstream = numpy(x).reshape(18, 70), numpy(w), numpy(g).reshape(18, 30)
    product = matmul(rows, weight.T, "int16", int16.balance_of(weight.T))
    expected = (torch.tensor(product.astype(np.float32)) + b.detach().float()).to(dtype)
    assert bits(y.reshape(18, 30)) == bits(expected)
    assert bits(dx.reshape(18, 70)) == bits(matmul(upstream, weight, "int16", int16.balance_of(weight)))
    over_tokens = matmul(rows.T, upstream, "int16", int16.balance_between(rows.T, upstream))
    assert bits(dw) == bits(np.ascontiguousarray(over_tokens.T))
    assert bits(db) == bits(reduction.sum(upstream, 0))
    assert bits(y) == bits(
        torch.stack([igt.linear(row, w, b, precision=precision) for row in x.flatten(0, 1)]).view_as(y)
    )
    assert bits(igt.linear(x, w, precision=precision)) == bits(product.reshape(2, 9, 30))
    # An outlier that the weight damps: without the balance the other 69 terms would lose nine bits.
    exact = rows.astype(np.float64) @ weight.T.astype(np.float64)
    half_ulp = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-12
    assert (np.abs(product.astype(np.float64) - exact) <= half_ulp * np.abs(exact) + 2.0**-10).all()


@pytest.mark.parametrize("balance", ["", "other", "tokens"])
def test_derivatives_of_any_order(balance):
    x, w = normal(3, 4, dtype=torch.float64), normal(4, 5, dtype=torch.float64)

    def product(a, b):
        return MATMUL(a, b, "", balance)

    assert torch.autograd.gradcheck(product, (x, w), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (x, w))
    b = normal(5, dtype=torch.float64)

    def affine(a, c, d):
        return igt.linear(a, c.t(), d)

    assert torch.autograd.gradcheck(affine, (x, w, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(affine, (x, w, b))


def test_every_member_of_a_batch_has_the_bits_it_has_alone():
    x, w, b = (normal(*s, grad=False) for s in ((3, 6, 20), (3, 7, 20), (3, 7)))
    for dims in ((0, None, None), (0, 0, 0), (None, 0, None), (None, None, 0)):
        given = [t if d == 0 else t[0] for t, d in zip((x, w, b), dims, strict=True)]
        alone = [igt.linear(*[t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)]) for i in range(3)]
        assert bits(torch.vmap(igt.linear, dims)(*given)) == bits(torch.stack(alone))
    y = torch.vmap(igt.matmul, (0, None))(x, w[0].T)
    assert bits(y) == bits(torch.stack([igt.matmul(row, w[0].T) for row in x]))

    def gradient(u, v, c):
        return torch.func.grad(lambda u, v, c: igt.linear(u, v, c).float().square().sum(), (0, 1, 2))(u, v, c)

    found = torch.vmap(gradient)(x, w, b)
    for i in range(3):
        for part, alone in zip(found, gradient(x[i], w[i], b[i]), strict=True):
            assert bits(part[i]) == bits(alone)


def test_torch_accepts_the_operators():
    x, w, b = layer(torch.float32)
    torch.library.opcheck(MATMUL.overload, (x, w.t()))
    torch.library.opcheck(MATMUL.overload, (x.flatten(0, 1), w.t(), "int16", "other"))
    torch.library.opcheck(ADD_TO_ROWS.overload, (normal(4, 30, dtype=torch.float32), b))
    torch.library.opcheck(SUM_OF_ROWS.overload, (normal(4, 30, dtype=torch.float32),))


def test_what_is_refused():
    x, w, _ = layer(torch.float64)
    with pytest.raises(ig.UnsupportedError, match=r"matmul: precision is 'int16' for float64"):
        igt.matmul(x, w.T, precision="int16")
    with pytest.raises(ig.InvalidProblemError, match=r"linear: precision is 'bf16'; accepted: int16, wide, None"):
        igt.linear(x, w, precision="bf16")
    with pytest.raises(ig.InvalidProblemError, match=r"matmul: the batches of input .* do not broadcast"):
        igt.matmul(normal(2, 3, 4), normal(3, 4, 5))


# --- experts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, None), (torch.float32, "int16")])
def test_grouped_linear_has_the_bits_of_each_expert_alone(dtype, precision):
    ends, g = [0, 5, 5, 6, 19], normal(19, 7, dtype=dtype, grad=False)
    x, w, bias = normal(19, 40, dtype=dtype), normal(4, 7, 40, dtype=dtype), normal(4, 7, dtype=dtype)
    y = igt.grouped_linear(x, w, torch.tensor(ends), bias, precision=precision)
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), g)
    for e in range(4):
        here = slice(ends[e], ends[e + 1])
        alone = [t.detach().clone().requires_grad_() for t in (x[here], w[e], bias[e])]
        z = igt.linear(*alone, precision=precision)
        grads = torch.autograd.grad(z, alone, g[here])
        assert bits(y[here]) == bits(z)
        assert [bits(t) for t in (dx[here], dw[e], db[e])] == [bits(t) for t in grads]
    assert bits(igt.grouped_linear(x, w, ends, precision=precision)) != bits(y)
    assert igt.grouped_linear(x[:0], w[:0], [0], precision=precision).shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_of_experts_have_the_bits_of_each_alone(dtype):
    """What a GPU computes in one launch, and its gradients of first and second order."""
    ends = torch.tensor([0, 5, 5, 6, 19])
    x, w, g = normal(19, 40, dtype=dtype), normal(4, 7, 40, dtype=dtype), normal(19, 7, dtype=dtype)
    h = [normal(19, 40, dtype=dtype, grad=False), normal(4, 7, 40, dtype=dtype, grad=False)]

    def derivatives(y):
        first = torch.autograd.grad(y, (x, w), g, create_graph=True)
        return [y, *first, *torch.autograd.grad(first, (x, w, g), h)]

    expected = derivatives(igt.grouped_linear(x, w, ends, precision="int16"))
    assert list(map(bits, derivatives(GROUPED_MATMUL(x, w.mT, ends, True)))) == list(map(bits, expected))
    checked = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(GROUPED_MATMUL.overload, (x, w.mT, ends, True), test_utils=checked)
    torch.library.opcheck(GROUPED_OUTER.overload, (x, g, ends), test_utils=checked)


@pytest.mark.parametrize("ends", [[0, 5, 5, 6, 19], [0, 0, 0], [0, 3]], ids=str)
def test_one_product_for_all_experts_has_the_bits_of_each(ends):
    """The way that a GPU takes, by the operators of the CPU."""
    x, w, bias = (
        normal(*shape, dtype=torch.bfloat16) for shape in ((ends[-1], 40), (len(ends) - 1, 7, 40), (len(ends) - 1, 7))
    )
    g = normal(ends[-1], 7, dtype=torch.bfloat16, grad=False)
    if ends[-1] > 3:
        g[1, 2], g[2, 3] = torch.inf, torch.nan
    found = []
    for call in (igt.grouped_linear, grouped._in_one_product):
        y = call(x, w, torch.tensor(ends), bias)
        found.append([bits(t) for t in (y, *torch.autograd.grad(y, (x, w, bias), g))])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 5, 3], "offsets go from 0 to 3 for 3 rows; expected 0 to 3 without a decrease"),
        ([0, 1, 2], "from 0 to 2 for 3 rows"),
        (torch.tensor([1, 2, 3]), "from 1 to 3 for 3 rows"),
        ([0, 3], "2 offsets for 2 experts; expected one more"),
        (torch.tensor([0.0, 1, 3]), "offsets is torch.float32"),
        ([0.0, 1.0, 3.0], "offsets is \\[0.0, 1.0, 3.0\\]; expected integers"),
        (None, "offsets is None; expected integers"),
        (3, "offsets is 3; expected integers"),
    ],
)
def test_errors_of_grouped_linear(offsets, words):
    with pytest.raises(ig.errors.InvalidProblemError, match=f"grouped_linear: .*{words}"):
        igt.grouped_linear(torch.ones(3, 4), torch.ones(2, 5, 4), offsets)
    with pytest.raises(ig.errors.InvalidProblemError, match="grouped_linear: input, weight have shapes"):
        igt.grouped_linear(torch.ones(3, 4), torch.ones(5, 4), [0, 3])
