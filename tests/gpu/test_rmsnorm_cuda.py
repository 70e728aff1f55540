"""rmsnorm on a real GPU in torch's spelling: autocast, and the gradient of a weight for any order of the rows."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402


def test_autocast_computes_in_float32() -> None:
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = igt.rms_norm(x, (64,), w)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x.float(), (64,), w))
    y.sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert w.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_weight_does_not_know_the_order_of_the_rows(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(20_000, 256, device="cuda").to(dtype) for _ in range(2))
    _, rstd = ig.rmsnorm(x, return_rstd=True)
    order = torch.randperm(20_000, device="cuda")
    dx, dweight = ig.rmsnorm_backward(dy, x, rstd)
    moved, again = ig.rmsnorm_backward(dy[order], x[order], rstd[order])
    assert torch.equal(moved, dx[order])
    assert torch.equal(again, dweight)
    on_cpu = ig.rmsnorm_backward(dy.cpu(), x.cpu(), rstd.cpu())
    assert torch.equal(dx.cpu(), on_cpu[0])
    assert torch.equal(dweight.cpu(), on_cpu[1])
