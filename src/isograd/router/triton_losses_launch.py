"""How the Triton kernels of the router's auxiliary losses are launched."""

import torch

from isograd import faults
from isograd.reduction import cuda as reduction
from isograd.router import triton_moe
from isograd.router.triton_launch import Result, count_entries, matrix, native_pairs, programs_of, tile
from isograd.triton_launcher import Launcher, Specification, kept, power_of_two


@kept
def _balance(n: int, entries: int, dtype: torch.dtype) -> Launcher:
    return Launcher(triton_moe.balance, Specification((n, entries, power_of_two(n)), 1))


def load_balancing_loss(probabilities: torch.Tensor, experts: torch.Tensor, loss: torch.Tensor) -> None:
    """Fill the loss."""
    n = probabilities.shape[-1]
    totals = count_entries("load_balancing_loss", experts, n).totals
    means = reduction.mean(matrix(probabilities).to(loss.dtype), 0)
    _balance(n, experts.numel(), loss.dtype)(totals, means, loss)
    faults.after_launch(loss.device)


@kept
def _balance_backward(
    tokens: int, n: int, entries: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Launcher:
    block = min(power_of_two(n), 1024)
    rows = max(4096 // block, 1)
    tail = (tokens, n, entries, *strides, rows, block)
    specification = Specification(tail, programs_of(tokens, rows) * programs_of(n, block))
    return Launcher(triton_moe.balance_backward, specification)


def load_balancing_loss_backward(dloss: torch.Tensor, experts: torch.Tensor, dprobabilities: torch.Tensor) -> None:
    """Fill dprobabilities."""
    n = dprobabilities.shape[-1]
    totals = count_entries("load_balancing_loss_backward", experts, n).totals
    if dprobabilities.numel():
        out = Result(dprobabilities)
        key = (len(out.matrix), n, experts.numel(), out.matrix.stride(), (dloss.dtype, out.matrix.dtype))
        _balance_backward(*key)(totals, dloss, out.matrix)
        out.done()
    faults.after_launch(dloss.device)


@kept
def _z_loss(
    tokens: int, n: int, strides: tuple[int, ...], dtype: torch.dtype, backward: bool, native: bool
) -> Launcher:
    t = tile(n, dtype.itemsize)
    tail = (tokens, n, *strides, backward, *t.fixed, native)
    return Launcher(triton_moe.z_loss_rows, Specification(tail, programs_of(tokens, t.rows), t.warps))


def router_z_loss(logits: torch.Tensor, loss: torch.Tensor) -> None:
    """Fill the loss."""
    x = matrix(logits)
    squares = torch.empty(len(x), dtype=loss.dtype, device=x.device)
    if len(x):
        launcher = _z_loss(len(x), x.shape[1], (*x.stride(), 1, 1), x.dtype, False, native_pairs(x))
        launcher(x, squares, squares)
    loss.copy_(reduction.mean(squares))


def router_z_loss_backward(dloss: torch.Tensor, logits: torch.Tensor, dlogits: torch.Tensor) -> None:
    """Fill dlogits, which may be the logits."""
    if dlogits.numel() == 0:
        return
    x, out = matrix(logits), Result(dlogits)
    strides = (*x.stride(), *out.matrix.stride())
    launcher = _z_loss(len(x), x.shape[1], strides, x.dtype, True, native_pairs(x))
    launcher(x, dloss, out.matrix)
    out.done()
