"""How the Hopper kernels of attention are launched: which problems they take, their tiles, and what they are given.

TMA reads and writes whole tiles through descriptors of the tensors, which the driver makes for every launch.
"""

from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.devices.tma_launcher import Block, BlockLauncher
from isograd.devices.triton_launcher import Specification, kept, processors
from isograd.flash_attention import gluon_backward, gluon_cache, gluon_forward, triton_launch
from isograd.flash_attention import gluon_steps as steps
from isograd.flash_attention import triton_rows_launch as rows_launch
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionDescriptor, AttentionWithCacheDescriptor
from isograd.flash_attention.triton_problem import Arguments, Outputs, Problem, extras, problem_of

# What the kernels take, in both directions: head dimensions, and options besides causal and full attention. What is
# struck out here goes to Triton's kernels. Without packed sequences these may not be tried before Triton's: a sequence
# would have other bits among others than alone.
HEAD_DIMS = (64, 80, 96, 112, 128)
OPTIONS = ("packed sequences", "a window", "a softcap", "sinks")
TILE_KEYS = 128  # of the backward pass


def supports(d: AttentionDescriptor) -> str | None:
    """Why the kernels do not take a validated problem, or None if they do; a function of the descriptor alone."""
    if isinstance(d, AttentionWithCacheDescriptor):
        if d.batch * max(d.k_length, d.q_length) > _REACH:
            return f"{d.batch} sequences have room for {d.k_length} keys each; accepted: up to {_REACH} in all"
        return supports(d.whole())
    o = d.options
    given = {
        "a window": o.window is not None,
        "a softcap": o.softcap > 0,
        "dropout": o.dropout_p > 0,
        "a bias": d.bias_shape is not None,
        "a mask": d.mask_shape is not None,
        "segment ids": d.segments,
        "packed sequences": d.sequences is not None,
        "sinks": d.sinks_dtype is not None,
    }
    if d.head_dim != d.v_dim or d.head_dim not in HEAD_DIMS:
        accepted = ", ".join(map(str, HEAD_DIMS))
        return f"the head dimensions are {d.head_dim} and {d.v_dim}; accepted: {accepted}, the same for both"
    if found := [name for name, there in given.items() if there and name not in OPTIONS]:
        return f"there is {', '.join(found)}; accepted: causal or full attention, {', '.join(OPTIONS)}"
    if not (o.scale or 0) > 0:
        return f"scale is {o.scale}; accepted: positive numbers"
    if 0 in (d.batch, d.heads, d.q_length, d.k_length):
        return "an operand is empty"
    if d.sequences is not None and max(d.q_length, d.k_length) > _REACH:
        return f"the sequences have {d.q_length} and {d.k_length} rows; accepted: up to {_REACH}"
    return None


class ForwardTiles(NamedTuple):
    """Groups of 64 queries in a tile, keys of a tile, tiles of keys in flight, registers a thread at the start."""

    consumers: int
    keys: int
    stages: int
    registers: int


class BackwardTiles(NamedTuple):
    """Queries of a tile, tiles of q and of do in flight."""

    queries: int
    q_stages: int
    do_stages: int
    dk_first: bool = False


def forward_tiles(head_dim: int) -> ForwardTiles:
    """The rule: a function of the head dimension alone."""
    return ForwardTiles(2, 128, 2, 168) if head_dim > 64 else ForwardTiles(3, 128, 3, 128)


def backward_tiles(head_dim: int) -> BackwardTiles:
    """The rule: a function of the head dimension alone."""
    return BackwardTiles(64, 2, 2) if head_dim > 64 else BackwardTiles(128, 2, 2)


# --- descriptors -----------------------------------------------------------------------------------------------------
_REACH = int(steps.REACH.value)


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides; that of an axis of one element is not used, and so a harmless one."""
    strides = [t.shape[-1] if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return (*strides, 1)


def _block(t: torch.Tensor, rows: int, packed: bool, columns: int = 0) -> Block:
    """Tiles of rows; rows are as wide as a power of two, what is not there is 0. Packed: see `gluon_steps`."""
    columns = columns or tiles.width(t.shape[-1])
    if not packed:
        return Block(tuple(t.shape), _strides(t), (1, 1, rows, columns))
    (_, heads, _, width), (_, head, row, _) = t.shape, _strides(t)
    most = 0x7FFF0000  # of an axis whose end is not looked for
    return Block((most, most, heads, _REACH, width), (steps.WRAP - row, row, head, row, 1), (1, 1, 1, rows, columns))


def _addressable(t: torch.Tensor) -> bool:
    """Whether a descriptor can address the rows: everything a multiple of 16 bytes, and no axis expanded."""
    strides, each = _strides(t)[:-1], 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and all(0 < stride < steps.WRAP and stride % each == 0 for stride in strides)


def _input(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy with the same bits."""
    return t if _addressable(t) else t.clone(memory_format=torch.contiguous_format)


# --- launches --------------------------------------------------------------------------------------------------------
class _Numbers(NamedTuple):
    """What both kernels are given of the options: ends of the window, factors of the scores, and flags."""

    left: int
    right: int
    scale: float
    cap: float
    flags: tuple[bool, bool, bool]
    packed: tuple[bool, bool]


def _numbers(p: Problem) -> _Numbers:
    lower_right, has_left, has_right = p.sides
    left, right, scale, cap, *_ = p.numbers
    offset = p.options.offset(p.lq, p.lk) if p.sequences is None else 0
    ends = (left + offset) if has_left else 0, (right + offset) if has_right else 0
    packed = p.sequences is not None
    flags = (has_left, has_right, p.options.softcap > 0)
    return _Numbers(*ends, scale, cap, flags, (packed, packed and lower_right))


@kept
def _forward(p: Problem, blocks: tuple[Block, ...], sinks: torch.dtype, tile: ForwardTiles, most: int) -> BlockLauncher:
    per_head, n = p.programs_of(p.lq, 64 * tile.consumers), _numbers(p)
    fixed = (tile.consumers, tile.keys, tiles.width(p.head_dim), tile.stages, *n.flags, p.sinks, *n.packed)
    total = per_head * p.heads * p.batch
    sizes = (p.lq, p.lk, n.left, n.right, p.heads, p.groups, per_head, total, p.sequences or 0)
    # A program for each processor, or for each tile where there are fewer.
    specification = Specification((*sizes, n.scale, n.cap, *fixed), min(total, most), 4, None, tile.registers)
    return BlockLauncher(gluon_forward.attention_forward_hopper, specification, blocks)


def forward(d: AttentionDescriptor, a: Arguments, config: ForwardTiles | None = None) -> None:
    """Fill o and lse; `config` overrides the rule."""
    if isinstance(d, AttentionWithCacheDescriptor):
        _forward_with_cache(d, a)
        return
    tile = config or forward_tiles(d.head_dim)
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    q, k, v, o = _input(a["q"]), _input(a["k"]), _input(a["v"]), outputs["o"]
    lse = a["lse"] if a["lse"].is_contiguous() else torch.empty_like(a["lse"], memory_format=torch.contiguous_format)
    sinks = a["sinks"].contiguous() if p.sinks else q
    packed = p.sequences is not None
    rows = (64, tile.keys, tile.keys, 64)
    blocks = tuple([_block(t, n, packed) for t, n in zip((q, k, v, o), rows, strict=True)])
    triton_launch.note_starts(p, d.operation, x)
    _forward(p, blocks, sinks.dtype, tile, processors(q))(q, k, v, o, lse, x.q_starts, x.k_starts, sinks)
    outputs.done()
    if lse is not a["lse"]:
        a["lse"].copy_(lse)
    faults.after_launch(q.device)


def _forward_with_cache(d: AttentionWithCacheDescriptor, a: Arguments) -> None:
    if a["lse"].numel() == 0:
        return
    if 0 in d.k_shape or d.k_length == 0:  # without a product: Triton's kernel leaves what a sink leaves here
        triton_launch.forward(d, a)
        return
    used, table = triton_launch.used_keys(problem_of(d, a["q"]), d.operation, a)
    packed = gluon_cache.packed(d, a, used, table, _REACH)
    forward(packed.descriptor.validated(), packed.arguments)
    packed.unpack(a)


@kept
def _backward(p: Problem, blocks: tuple[Block, ...], tile: BackwardTiles) -> BlockLauncher:
    per_head, kv_heads, n = p.programs_of(p.lk, TILE_KEYS), p.heads // p.groups, _numbers(p)
    sizes = (p.batch * p.heads * p.pitch, p.pitch, p.lq, p.lk, n.left, n.right, kv_heads, p.groups, per_head)
    fixed = (tiles.width(p.head_dim), *tile[:3], *n.flags, *n.packed, tile.dk_first)
    tail = (*sizes, p.sequences or 0, p.scale, n.scale, n.cap, *fixed)
    specification = Specification(tail, per_head * kv_heads * p.batch, 4, None, 168)
    return BlockLauncher(gluon_backward.attention_backward_hopper, specification, blocks)


def backward(d: Any, a: Arguments, config: BackwardTiles | None = None) -> None:
    """Fill dq, dk and dv, and dsinks where they are wanted; `config` overrides the rule."""
    tile = config or backward_tiles(d.head_dim)
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    do, q, k, v, o = (_input(a[name]) for name in ("do", "q", "k", "v", "o"))
    dq, dk, dv = outputs["dq"], outputs["dk"], outputs["dv"]
    triton_launch.note_starts(p, d.operation, x)
    bounds = rows_launch.fill_bounds(p, k, v, x)
    integers = torch.empty(d.q_shape, dtype=torch.int32, device=q.device)
    rows = rows_launch.fill_rows(p, o, do, a["lse"], a.get("dlse"), x, (bounds, integers))
    packed = p.sequences is not None
    blocks = (
        _block(q, tile.queries, packed),
        _block(k, 64, packed),
        _block(v, 64, packed),
        _block(do, tile.queries, packed),
        _block(dk, 64, packed),
        _block(dv, 64, packed),
        _block(integers, 64, packed, 64),
    )
    launcher = _backward(p, blocks, tile)
    launcher(q, k, v, do, dk, dv, integers, rows, bounds, x.q_starts, x.k_starts)
    rows_launch.fixed_to_float(p, integers, rows, bounds, dq, x)
    if "dsinks" in a:
        triton_launch.fill_dsinks(p, a, rows)
    outputs.done()
    faults.after_launch(q.device)
