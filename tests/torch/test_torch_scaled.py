"""Products with a number: isograd's own whatever the rounding mode, and so what is made of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd.torch as igt
from isograd.torch.ops_scaled import DIVIDED, SCALED

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_environment import MODES, environment

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear_gradients(x, source, bias, targets, factor):
    loss = igt.linear_cross_entropy(x, source, targets, bias)
    return torch.autograd.grad(loss, (x, source, bias), factor.to(loss.dtype))


def sums(x, source, bias, rows, factor):
    out = igt.index_add(source, 0, rows, x, alpha=factor.item())
    return out, *torch.autograd.grad(out, (x, source), source.detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [linear_gradients, sums])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_mode_of_the_caller_reaches_a_product(dtype, call, mode):
    generator = torch.Generator().manual_seed(0)
    shapes = ((400, 70), (100, 70), (100,))
    leaves = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    indices = torch.randperm(400, generator=generator) % 100
    # A number that every work type has: what the caller rounds is the caller's.
    factor = torch.tensor(2e-38 if mode == "flush" and dtype is torch.float32 else 0.3).double()
    expected = call(*leaves, indices, factor)
    with environment(mode):
        got = call(*leaves, indices, factor)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_rounded_to_the_work_type_and_to_the_storage_type(dtype):
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    work = torch.float64 if dtype is torch.float64 else torch.float32
    for factor in (0.3, 1e-6, -2.0, 65536.0):
        for y in (x, x.T, x[:, ::2], x[0, 0], x[:0]):
            got = SCALED(y, torch.tensor(factor, dtype=torch.float64))
            expected = (y.to(work) * torch.tensor(factor, dtype=work)).to(dtype)
            assert got.is_contiguous()
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(SCALED(x, torch.tensor(0.5)))[0, 2], torch.tensor(True))


def test_opcheck_and_derivatives():
    x, factor = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.tensor(0.7, dtype=torch.float64)
    torch.library.opcheck(SCALED.overload, (x, factor))
    both = (x, factor.clone().requires_grad_())
    assert torch.autograd.gradcheck(SCALED, both, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(SCALED, both)
    assert torch.equal(torch.func.vmap(SCALED, (0, None))(x, factor), x * factor)
    divisor = x.detach().square() + 1
    torch.library.opcheck(DIVIDED.overload, (x, divisor))
    assert torch.autograd.gradcheck(DIVIDED, (x, divisor), check_forward_ad=True, check_batched_grad=True)
    assert torch.equal(torch.func.vmap(DIVIDED, (0, None))(x, divisor[0]), x / divisor[0])


def test_only_what_a_derivative_reads_is_kept():
    x = torch.randn(4, 3, requires_grad=True)
    # The results stay, since a node lets go of its tensors when nothing refers to what it made.
    constant, differentiated = (SCALED(x, torch.tensor(2.0, requires_grad=by)) for by in (False, True))
    assert constant.grad_fn.saved_tensors[0] is None
    assert differentiated.grad_fn.saved_tensors[0] is x
