"""How the Triton kernels of the router's auxiliary losses are launched."""

import math

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import Launcher, Specification, kept, power_of_two
from isograd.ops.router import triton_moe
from isograd.ops.router.triton_launch import Result, count_entries, matrix, native_pairs, programs_of, tile
from isograd.reduction import cuda as reduction


def _problems(x: torch.Tensor, batched: bool) -> tuple[int, int]:
    """How many problems there are, and the tokens of each."""
    return (x.shape[0], math.prod(x.shape[1:-1])) if batched else (1, math.prod(x.shape[:-1]))


def _totals(operation: str, experts: torch.Tensor, n: int, problems: int) -> torch.Tensor:
    """The entries of every problem's experts, then those of no expert."""
    if problems != 1:
        own = experts.long().reshape(problems, -1) if problems else experts.long()
        first = torch.arange(problems, device=own.device).unsqueeze(1) * n
        experts = torch.where((own >= 0) & (own < n), own + first, -1) if problems else own
    return count_entries(operation, experts, problems * n).totals


@kept
def _balance(problems: int, n: int, entries: int, stride: int, dtype: torch.dtype) -> Launcher:
    return Launcher(
        triton_moe.balance, Specification((n, entries, stride, power_of_two(n)), problems, free=("entries",))
    )


def load_balancing_loss(
    probabilities: torch.Tensor, experts: torch.Tensor, loss: torch.Tensor, batched: bool = False
) -> None:
    """Fill the losses: one, or one for every place in the first dimension."""
    n, (problems, tokens) = probabilities.shape[-1], _problems(probabilities, batched)
    if not problems:
        return
    totals = _totals("load_balancing_loss", experts, n, problems)
    means = reduction.mean(probabilities.reshape(problems, tokens, n).to(loss.dtype), 1)
    stride = loss.stride(0) if batched else 0
    _balance(problems, n, experts.numel() // problems, stride, loss.dtype)(totals, means, loss)
    faults.after_launch(loss.device)


@kept
def _balance_backward(
    problems: int, tokens: int, n: int, entries: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Launcher:
    block = min(power_of_two(n), 1024)
    rows = max(4096 // block, 1)
    tail = (problems, tokens, n, entries, *strides, rows, block)
    programs = problems * programs_of(tokens, rows) * programs_of(n, block)
    specification = Specification(tail, programs, free=("problems", "tokens", "entries"))
    return Launcher(triton_moe.balance_backward, specification)


def load_balancing_loss_backward(
    dloss: torch.Tensor, experts: torch.Tensor, dprobabilities: torch.Tensor, batched: bool = False
) -> None:
    """Fill dprobabilities."""
    n, (problems, tokens) = dprobabilities.shape[-1], _problems(dprobabilities, batched)
    if not problems:
        return
    totals = _totals("load_balancing_loss_backward", experts, n, problems)
    if dprobabilities.numel():
        out = Result(dprobabilities)
        strides = (dloss.stride(0) if batched else 0, *out.matrix.stride())
        key = (problems, tokens, n, experts.numel() // problems, strides, (dloss.dtype, out.matrix.dtype))
        _balance_backward(*key)(totals, dloss, out.matrix)
        out.done()
    faults.after_launch(dloss.device)


@kept
def _z_loss(
    rows: int, tokens: int, n: int, strides: tuple[int, ...], dtype: torch.dtype, backward: bool, native: bool
) -> Launcher:
    t = tile(n, dtype.itemsize)
    tail = (rows, tokens, n, *strides, backward, *t.fixed, native)
    specification = Specification(tail, programs_of(rows, t.rows), t.warps, free=("rows_", "tokens"))
    return Launcher(triton_moe.z_loss_rows, specification)


def router_z_loss(logits: torch.Tensor, loss: torch.Tensor, batched: bool = False) -> None:
    """Fill the losses: one, or one for every place in the first dimension."""
    x = matrix(logits)
    squares = torch.empty(len(x), dtype=loss.dtype, device=x.device)
    if len(x):
        launcher = _z_loss(len(x), len(x), x.shape[1], (0, *x.stride(), 1, 1), x.dtype, False, native_pairs(x))
        launcher(x, squares, squares)
    loss.copy_(reduction.mean(squares.view(_problems(logits, batched)), 1).view(loss.shape))


def router_z_loss_backward(
    dloss: torch.Tensor, logits: torch.Tensor, dlogits: torch.Tensor, batched: bool = False
) -> None:
    """Fill dlogits, which may be the logits."""
    if dlogits.numel() == 0:
        return
    x, out = matrix(logits), Result(dlogits)
    strides = (dloss.stride(0) if batched else 0, *x.stride(), *out.matrix.stride())
    tokens = _problems(logits, batched)[1]
    launcher = _z_loss(len(x), tokens, x.shape[1], strides, x.dtype, True, native_pairs(x))
    launcher(x, dloss, out.matrix)
    out.done()
