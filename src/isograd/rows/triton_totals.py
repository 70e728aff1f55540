# mypy: ignore-errors
# ruff: noqa: N803
"""What a mean over targets divides by, and quotients rounded once, on torch tensors of one GPU."""

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Specification, launch
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops

_BLOCK = 1024
_CHUNK = 1 << 13  # targets that a program counts: memory takes as long to answer as to send these


@triton.jit(do_not_specialize=["count", "step", "ignore_index"])
def count_targets(target_ptr, out_ptr, count, step, ignore_index, BLOCK: tl.constexpr):
    """Count the targets of a block that are not ignored."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + place * step, mask=place < count, other=0).to(tl.int64)
    found = ((place < count) & (target != memory.wide_int(ignore_index))).to(tl.int32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(found, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["parts"])
def add_counts(part_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    """Add integers up in one program."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, parts, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + place, mask=place < parts, other=0)
    tl.store(out_ptr, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "step", "classes", "ignore_index"])
def target_weights(
    target_ptr, weight_ptr, out_ptr, count, step, classes, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """The weight of every target: 0 where it is ignored, NaN where it is no class."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + place * step, mask=place < count, other=0).to(tl.int64)
    inside = (target >= 0) & (target < classes)
    weight = tl.load(weight_ptr + target, mask=inside & (place < count), other=float("nan"))
    weight = tl.where(target == memory.wide_int(ignore_index), 0.0, weight)
    tl.store(out_ptr + place, weight, mask=place < count)


@triton.jit(do_not_specialize=["count", "step"])
def divide(a_ptr, b_ptr, out_ptr, count, step, BLOCK: tl.constexpr):
    """Quotients, their NaN the canonical one."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    quotient = ops.divide(tl.load(a_ptr + place, mask=mask, other=0.0), tl.load(b_ptr + place * step, mask=mask))
    tl.store(out_ptr + place, tl.where(quotient == quotient, quotient, float("nan")), mask=mask)


def _as_it_is(tail: tuple[int, ...], programs: int, warps: int = 4) -> Specification:
    return Specification(tail, programs, warps)


def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The quotients of tensors of one dtype and device, b of a's shape or a single number, rounded once."""
    a, out = a.contiguous(), torch.empty(a.shape, dtype=a.dtype, device=a.device)
    count = a.numel()
    if count:
        tail = (count, 0 if b.numel() == 1 else 1, _BLOCK)
        launch(divide, (a, b.contiguous(), out), _as_it_is, tail, -(-count // _BLOCK))
    return out


def target_total(
    targets: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore_index: int, work: torch.dtype
) -> torch.Tensor:
    """The number of targets that are not ignored or, given weights of the classes, the weights of each."""
    flat = targets.reshape(-1)
    count, step = flat.numel(), flat.stride(0) if flat.numel() > 1 else 1
    # One that no index can have stands for one that int64 cannot hold.
    ignored = ignore_index if -(2**63) <= ignore_index < 2**63 else -(2**63)
    if weight is not None:
        own = torch.empty(count, dtype=work, device=flat.device)
        if count:
            tail = (count, step, classes, ignored, _BLOCK)
            launch(target_weights, (flat, weight.contiguous(), own), _as_it_is, tail, -(-count // _BLOCK))
        return own
    out = torch.empty((), dtype=work, device=flat.device)
    programs = max(-(-count // _CHUNK), 1)
    parts = out if programs == 1 else torch.empty(programs, dtype=torch.int64, device=flat.device)
    launch(count_targets, (flat, parts), _as_it_is, (count, step, ignored, _CHUNK), programs, 16)
    if programs > 1:
        launch(add_counts, (parts, out), _as_it_is, (programs, _BLOCK), 1)
    return out
