"""First and second derivatives, torch.func, and what autograd keeps."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.errors import UnsupportedError

KINDS = ("softmax", "log_softmax")
FORWARD = {"softmax": igt.softmax, "log_softmax": igt.log_softmax}
BACKWARD = {"softmax": igt.softmax_backward, "log_softmax": igt.log_softmax_backward}


def sample(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((), 0)])
def test_first_and_second_derivatives(kind, shape, dim):
    x = sample(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: FORWARD[kind](t, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda t: FORWARD[kind](t, dim), (x,))


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_operator_is_differentiable(kind):
    dy, y = sample(3, 4).requires_grad_(), sample(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: BACKWARD[kind](a, b, -1), (dy, y))
    assert torch.autograd.gradgradcheck(lambda a, b: BACKWARD[kind](a, b, -1), (dy, y))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_second_derivatives_of_narrow_types_follow_those_of_float64(kind, dtype):
    def second(t):
        (first,) = torch.autograd.grad(FORWARD[kind](t, -1).pow(2).sum(), t, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), t)[0]

    x = sample(3, 4).to(dtype)
    narrow, wide = second(x.clone().requires_grad_()), second(x.double().requires_grad_())
    assert narrow.dtype is dtype
    torch.testing.assert_close(narrow.double(), wide, atol=8 * torch.finfo(dtype).eps * wide.abs().max(), rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_operand_that_needs_no_gradient_costs_none(kind):
    dy, y = sample(3, 4).requires_grad_(), sample(3, 4, seed=1)
    BACKWARD[kind](dy, y, -1).sum().backward()
    assert dy.grad is not None
    assert y.grad is None
    assert not FORWARD[kind](y, -1).requires_grad
    with torch.no_grad():
        assert not FORWARD[kind](dy, -1).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_result_is_saved(kind):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = FORWARD[kind](sample(3, 4).requires_grad_(), -1)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


def test_the_result_may_not_be_changed_before_its_backward():
    y = igt.softmax(sample(3, 4).requires_grad_(), -1)
    with torch.no_grad():
        igt.softmax(sample(3, 4), -1, out=y)  # writes through isograd count as torch's own do
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_gradient_in_place_is_what_its_caller_asked_for_and_nothing_else():
    x = sample(3, 4).requires_grad_()
    dy = sample(3, 4, seed=1)
    before = dy.clone()
    igt.softmax(x, -1).backward(dy)
    assert torch.equal(dy, before)
    expected = igt.softmax_backward(dy, igt.softmax(x.detach(), -1), -1)
    y = igt.softmax(x.detach(), -1)
    assert igt.softmax_backward(dy, y, -1, out=dy) is dy
    assert torch.equal(dy, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_func(kind):
    x = sample(6, 5)

    def loss(function, t):
        return (function(t, -1) * torch.arange(5.0, dtype=t.dtype)).sum().square()

    def ours(t):
        return loss(FORWARD[kind], t)

    def theirs(t):
        return loss(getattr(torch, kind), t)

    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(transform(ours)(x[0]), transform(theirs)(x[0]))
    per_sample = torch.func.vmap(torch.func.grad(ours))(x)
    torch.testing.assert_close(per_sample, torch.func.vmap(torch.func.grad(theirs))(x))
    assert torch.equal(per_sample, torch.stack([torch.func.grad(ours)(row) for row in x]))
    nested = torch.func.vmap(torch.func.jacrev(torch.func.grad(ours)))(x)
    torch.testing.assert_close(nested, torch.func.vmap(torch.func.jacrev(torch.func.grad(theirs)))(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_dim", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, -1])
def test_vmap_has_the_bits_of_a_loop(kind, in_dim, dim):
    x = sample(3, 4, 5, dtype=torch.float32)
    mapped = torch.func.vmap(lambda t: FORWARD[kind](t, dim), in_dims=in_dim)(x)
    assert torch.equal(mapped, torch.stack([FORWARD[kind](t, dim) for t in x.unbind(in_dim)]))
    dy = sample(4, 5, dtype=torch.float32, seed=1)
    y = FORWARD[kind](sample(3, 4, 5, dtype=torch.float32), dim)
    mapped = torch.func.vmap(lambda b: BACKWARD[kind](dy, b, dim))(y)
    assert torch.equal(mapped, torch.stack([BACKWARD[kind](dy, b, dim) for b in y]))
    scalars = torch.func.vmap(lambda t: FORWARD[kind](t, 0))(sample(4))
    assert torch.equal(scalars, torch.full((4,), 1.0 if kind == "softmax" else 0.0, dtype=torch.float64))
    twice = torch.func.vmap(torch.func.vmap(lambda t: FORWARD[kind](t, 0)))(x)
    assert torch.equal(twice, FORWARD[kind](x, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode(kind):
    x, t = sample(3, 4), sample(3, 4, seed=1)
    ours, theirs = FORWARD[kind], getattr(torch, kind)
    for a, b in zip(
        torch.func.jvp(lambda v: ours(v, -1), (x,), (t,)),
        torch.func.jvp(lambda v: theirs(v, -1), (x,), (t,)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    x = x[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ours(v, -1), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda v: ours(v, -1), (x,), check_fwd_over_rev=True)

    def loss(function):
        return lambda v: (function(v, -1) * torch.arange(4.0, dtype=v.dtype)).sum().square()

    for transform in (torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.jacfwd(f))):
        torch.testing.assert_close(transform(loss(ours))(t[0]), transform(loss(theirs))(t[0]))


def test_conversion_and_gradient_types():
    for dtype in (torch.float16, torch.float32):
        x = sample(3, 4).to(dtype).requires_grad_()
        y = igt.softmax(x, -1, dtype=torch.float64)
        assert y.dtype is torch.float64
        y.square().sum().backward()
        assert x.grad.dtype is dtype
    whole = torch.arange(4)
    assert torch.equal(igt.softmax(whole, 0, dtype=torch.float32), igt.softmax(whole.float(), 0))
    assert not igt.softmax(whole, 0, dtype=torch.float32).requires_grad


def test_out_records_no_gradient():
    x = sample(3, 4).requires_grad_()
    with pytest.raises(UnsupportedError, match="requires a gradient, which is not recorded"):
        igt.softmax(x, -1, out=torch.empty(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_functions_differentiate_tensors(kind):
    x = sample(3, 4).requires_grad_()
    getattr(ig, kind)(x, axis=0).square().sum().backward()
    expected = sample(3, 4).requires_grad_()
    getattr(torch, kind)(expected, 0).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_modules():
    x = sample(2, 3, 4)
    assert torch.equal(igt.Softmax(1)(x), igt.softmax(x, 1))
    assert torch.equal(igt.LogSoftmax(dim=-1)(x), igt.log_softmax(x, -1))
    assert repr(igt.Softmax(1)) == "Softmax(dim=1)"
    assert isinstance(igt.LogSoftmax(0), torch.nn.LogSoftmax)
