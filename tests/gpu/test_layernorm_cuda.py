"""layernorm on a real GPU in torch's spelling: autocast, and gradients of weight and bias for any order of the rows."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402


def test_autocast_computes_in_float32() -> None:
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w, b = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))
    with torch.autocast("cuda", torch.bfloat16):
        y = igt.layer_norm(x, (64,), w, b)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.float(), (64,), w, b))
    y.sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert w.grad.dtype is b.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [256, 20_000])  # rows that are held, and rows that are read again
def test_gradients_of_weight_and_bias_do_not_know_the_order_of_the_rows(dtype: torch.dtype, width: int) -> None:
    rows = 5_000_000 // width
    x, dy = (torch.randn(rows, width, device="cuda").to(dtype) + shift for shift in (3, 0))
    y, mean, rstd = ig.layernorm(x, return_statistics=True)
    order = torch.randperm(rows, device="cuda")
    dx, *sums = ig.layernorm_backward(dy, x, mean, rstd)
    moved, *again = ig.layernorm_backward(dy[order], x[order], mean[order], rstd[order])
    assert torch.equal(moved, dx[order])
    assert all(torch.equal(a, s) for a, s in zip(again, sums, strict=True))
    forward = ig.layernorm(x.cpu(), return_statistics=True)
    backward = ig.layernorm_backward(dy.cpu(), x.cpu(), mean.cpu(), rstd.cpu())
    for gpu, cpu in zip((y, mean, rstd, dx, *sums), (*forward, *backward), strict=True):
        assert torch.equal(gpu.cpu(), cpu)
