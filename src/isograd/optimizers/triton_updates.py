# ruff: noqa: N803, RET505, SIM108
# mypy: ignore-errors
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The updates in Triton, over chunks of many tensors; `reference.py` is the definition."""

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Specification, launch
from isograd.numerics import triton_ops as ops
from isograd.numerics.storage import compute_dtype
from isograd.optimizers import chunks as of_tensors
from isograd.optimizers import numbers as given
from isograd.optimizers.numbers import NUMBERS, Rates, Update
from isograd.rows.triton_launch import words_of
from isograd.rows.triton_tiles import number

_COLUMNS, _COUNT, _STEP = (tl.constexpr(n) for n in (of_tensors.COLUMNS, of_tensors.COUNT, of_tensors.STEP))
_ADAM, _SGD = tl.constexpr(given.ADAM), tl.constexpr(given.SGD)
_COUPLED, _DECOUPLED = tl.constexpr(given.COUPLED), tl.constexpr(given.DECOUPLED)
_NUMBERS = tl.constexpr(len(NUMBERS))
_BLOCK, _WARPS = 1024, 4
_SHORT, _LONG = 2048, 1 << 14  # elements of a chunk, where tensors have few and where they have many
_MANY = 1 << 24


# --- the numbers -----------------------------------------------------------------------------------------------------
_WORDS = [f"{name}_{half}" for name in ("lr", *Rates._fields) for half in ("low", "high")]


@triton.jit
def _power(base, exponent):
    """The powers by squaring, from the highest bit down."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    for k in range(32):
        result *= result
        result = tl.where(((exponent >> (31 - k)) & 1) != 0, result * base, result)
    return result


@triton.jit
def _put(out_ptr, i, n, place: tl.constexpr, value):
    value = value.to(out_ptr.dtype.element_ty) + tl.zeros(i.shape, out_ptr.dtype.element_ty)
    tl.store(out_ptr + i * _NUMBERS + place, value, mask=i < n)


@triton.jit(do_not_specialize=_WORDS)
def update_numbers(
    table_ptr, lr_ptr, out_ptr, lr_low, lr_high, decay_low, decay_high, beta_1_low, beta_1_high, take_1_low,
    take_1_high, beta_2_low, beta_2_high, eps_low, eps_high, n, RULE: tl.constexpr, DECAY: tl.constexpr,
    LR_GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`NUMBERS` of every tensor, in binary64 and each rounded once; LR_GIVEN: the rate is in memory."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if LR_GIVEN:
        lr = tl.load(lr_ptr).to(tl.float64)
    else:
        lr = number(lr_low, lr_high, tl.float64)
    decay = number(decay_low, decay_high, tl.float64)
    beta_1, beta_2 = number(beta_1_low, beta_1_high, tl.float64), number(beta_2_low, beta_2_high, tl.float64)
    if DECAY == _DECOUPLED:
        decay = 1.0 - lr * decay
    _put(out_ptr, i, n, 0, decay)
    _put(out_ptr, i, n, 1, lr)
    _put(out_ptr, i, n, 2, beta_1)
    _put(out_ptr, i, n, 3, number(take_1_low, take_1_high, tl.float64))
    _put(out_ptr, i, n, 4, beta_2)
    _put(out_ptr, i, n, 5, 1.0 - beta_2)
    if RULE == _ADAM:
        address = tl.load(table_ptr + i * _COLUMNS + _STEP, mask=i < n, other=0)
        step = tl.load(address.to(tl.pointer_type(tl.float32)), mask=i < n, other=0.0).to(tl.int64)
        _put(out_ptr, i, n, 6, 1.0 - _power(beta_1, step))
        _put(out_ptr, i, n, 7, 1.0 - _power(beta_2, step))
        _put(out_ptr, i, n, 8, number(eps_low, eps_high, tl.float64))


# --- the updates -----------------------------------------------------------------------------------------------------
@triton.jit
def base(row, place: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address of a tensor of the table; ALIGNED: to 16 bytes."""
    base = tl.load(row + place).to(tl.pointer_type(dtype))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def read(base, offset, count, MASKED: tl.constexpr):
    """Elements in the work type; MASKED: zeros beyond the end."""
    if MASKED:
        return ops.widen(tl.load(base + offset, mask=offset < count, other=0.0), False)
    else:
        return ops.widen(tl.load(base + offset), False)


@triton.jit
def write(base, offset, count, value, MASKED: tl.constexpr):
    """Store elements, rounded to the storage type."""
    value = ops.narrow(value, base.dtype.element_ty, False)
    if MASKED:
        tl.store(base + offset, value, mask=offset < count)
    else:
        tl.store(base + offset, value)


@triton.jit
def _update(
    p_ptr, g_ptr, first_ptr, second_ptr, copy_ptr, of, offset, count, RULE: tl.constexpr, DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    COPIED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update one block of a tensor."""
    w, g = read(p_ptr, offset, count, MASKED), read(g_ptr, offset, count, MASKED)
    lr, keep_1, take_1 = tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    if MAXIMIZE:
        g = ops.negate(g)
    if DECAY == _COUPLED:
        g += tl.load(of) * w
    elif DECAY == _DECOUPLED:
        w *= tl.load(of)
    if RULE == _ADAM:
        m = read(first_ptr, offset, count, MASKED) * keep_1 + take_1 * g
        v = read(second_ptr, offset, count, MASKED) * tl.load(of + 4) + tl.load(of + 5) * (g * g)
        write(first_ptr, offset, count, m, MASKED)
        write(second_ptr, offset, count, v, MASKED)
        below = ops.root(ops.divide(v, tl.load(of + 7))) + tl.load(of + 8)
        w -= ops.divide(lr * ops.divide(m, tl.load(of + 6)), below)
    elif RULE == _SGD:
        if MOMENTUM:
            b = g
            if not FIRST:
                b = keep_1 * read(first_ptr, offset, count, MASKED) + take_1 * g
            write(first_ptr, offset, count, b, MASKED)
            if NESTEROV:
                g += keep_1 * b
            else:
                g = b
        w -= lr * g
    else:
        m = read(first_ptr, offset, count, MASKED)
        c = m * keep_1 + take_1 * g
        write(first_ptr, offset, count, m * tl.load(of + 4) + tl.load(of + 5) * g, MASKED)
        w -= tl.where(c > 0, lr, tl.where(c < 0, ops.negate(lr), c - c))
    write(p_ptr, offset, count, w, MASKED)
    if COPIED:
        write(copy_ptr, offset, count, w, MASKED)


@triton.jit
def update_chunks(
    table_ptr, chunks_ptr, numbers_ptr, P: tl.constexpr, G: tl.constexpr, COPY: tl.constexpr, RULE: tl.constexpr,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, COPIED: tl.constexpr, ALIGNED: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the tensors of a table in place; COPIED: the parameter is stored in another type as well."""
    work: tl.constexpr = numbers_ptr.dtype.element_ty
    chunk = chunks_ptr + 2 * tl.program_id(0).to(tl.int64)
    tensor, begin = tl.load(chunk), tl.load(chunk + 1) * LENGTH
    row, of = table_ptr + tensor * _COLUMNS, numbers_ptr + tensor * _NUMBERS
    count = tl.load(row + _COUNT)
    p_ptr, g_ptr = base(row, 0, P, ALIGNED), base(row, 1, G, ALIGNED)
    first_ptr, second_ptr = base(row, 2, work, ALIGNED), base(row, 3, work, ALIGNED)
    copy_ptr = base(row, 4, COPY, ALIGNED)
    offset = begin + tl.arange(0, BLOCK)
    # A mask would keep a whole chunk from being read in wide accesses.
    if begin + LENGTH <= count:
        for start in range(0, LENGTH, BLOCK):
            _update(
                p_ptr, g_ptr, first_ptr, second_ptr, copy_ptr, of, offset + start, count, RULE, DECAY, MOMENTUM, FIRST,
                NESTEROV, MAXIMIZE, COPIED, False,
            )  # fmt: skip
    else:
        for start in range(0, LENGTH, BLOCK):
            _update(
                p_ptr, g_ptr, first_ptr, second_ptr, copy_ptr, of, offset + start, count, RULE, DECAY, MOMENTUM, FIRST,
                NESTEROV, MAXIMIZE, COPIED, True,
            )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------
def chunk_length(elements: int) -> int:
    """The length of the chunks of tensors that have so many elements in all."""
    return _LONG if elements >= _MANY else _SHORT


def _numbers(update: Update, n: int, lr_given: bool) -> Specification:
    block = 32
    return Specification((n, update.rule, update.decay, lr_given, block), -(-n // block), 1, free=("n",))


def _updates(
    update: Update, types: tuple[str, str, str], copied: bool, aligned: bool, length: int, programs: int
) -> Specification:
    return Specification(
        (*[getattr(tl, name) for name in types], *update, copied, aligned, length, _BLOCK), programs, _WARPS
    )


def numbers_of(update: Update, rates: Rates, lr: float | torch.Tensor, table: torch.Tensor, dtype: str) -> torch.Tensor:
    """`NUMBERS` of the tensors of a table, for parameters of a dtype."""
    n = table.shape[0]
    numbers = torch.empty(n * len(NUMBERS), dtype=getattr(torch, compute_dtype(dtype)), device=table.device)
    in_memory = isinstance(lr, torch.Tensor)
    words = [word for value in (0.0 if in_memory else lr, *rates) for word in words_of(value, "float64")]
    tensors = table, lr if in_memory else numbers, numbers
    launch(update_numbers, tensors, _numbers, update, n, in_memory, numbers=tuple(words))
    return numbers


def launch_updates(
    update: Update,
    table: torch.Tensor,
    places: torch.Tensor,
    numbers: torch.Tensor,
    length: int,
    types: tuple[str, str, str],
    copied: bool,
    aligned: bool,
) -> None:
    """Update the chunks of a table; types: of parameters, gradients and copies."""
    launch(update_chunks, (table, places, numbers), _updates, update, types, copied, aligned, length, places.shape[0])
