"""Products with a number: isograd's own whatever the rounding mode, and so what is made of them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd.torch as igt
from isograd.torch.ops_scaled import SCALED

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_environment import MODES, environment

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def linear_gradients(dtype, factor):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((600, 70), (90, 70), (90,)))
    targets = torch.randint(90, (600,), generator=generator)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = igt.linear_cross_entropy(*leaves[:2], targets, bias)
    return torch.autograd.grad(loss, leaves, torch.tensor(factor, dtype=loss.dtype))


def sums(dtype, factor):
    generator = torch.Generator().manual_seed(1)
    x, source = (torch.randn(600, 70, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    out = igt.index_add(x, 0, torch.arange(600) // 2, source, alpha=factor)
    return out, *torch.autograd.grad(out, (x, source), x.detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [linear_gradients, sums])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_mode_of_the_caller_reaches_a_product(dtype, call, mode):
    factor = 1e-38 if mode == "flush" and dtype is torch.float32 else 0.3
    expected = call(dtype, factor)
    with environment(mode):
        got = call(dtype, factor)
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
    torch.library.opcheck(SCALED, (x, factor))
    both = (x, factor.clone().requires_grad_())
    assert torch.autograd.gradcheck(SCALED, both, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(SCALED, both)
    assert torch.equal(torch.func.vmap(SCALED, (0, None))(x, factor), x * factor)


def test_only_what_a_derivative_reads_is_kept():
    x = torch.randn(4, 3, requires_grad=True)
    assert igt.index_add(x, 0, torch.arange(4), x, alpha=2).grad_fn.next_functions[1][0].saved_tensors[0] is None
