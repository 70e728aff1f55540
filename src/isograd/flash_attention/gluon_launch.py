"""How the Hopper kernels of attention are launched: which problems they take, their tiles, and what they are given.

TMA reads and writes whole tiles through descriptors of the tensors, which the driver makes for every launch.
"""

from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.devices.tma_launcher import Block, BlockLauncher
from isograd.devices.triton_launcher import Specification, kept, processors
from isograd.flash_attention import gluon_backward, gluon_forward
from isograd.flash_attention import gluon_steps as steps
from isograd.flash_attention import triton_rows_launch as rows_launch
from isograd.flash_attention.descriptors import AttentionDescriptor
from isograd.flash_attention.triton_problem import Arguments, Outputs, extras, problem_of

HEAD_DIMS = (64, 128)
TILE_KEYS = 128  # of the backward pass


def supports(d: AttentionDescriptor) -> str | None:
    """Why the kernels do not take a validated problem, or None if they do."""
    o = d.options
    extras = {
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
        return f"the head dimensions are {d.head_dim} and {d.v_dim}; accepted: 64 or 128 for both"
    if found := [name for name, there in extras.items() if there]:
        return f"there is {', '.join(found)}; accepted: causal or full attention only"
    if not (o.scale or 0) > 0:
        return f"scale is {o.scale}; accepted: positive numbers"
    if 0 in (d.batch, d.heads, d.q_length, d.k_length):
        return "an operand is empty"
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
    return ForwardTiles(2, 128, 2, 168) if head_dim == 128 else ForwardTiles(3, 128, 3, 128)


def backward_tiles(head_dim: int) -> BackwardTiles:
    """The rule: a function of the head dimension alone."""
    return BackwardTiles(64, 2, 2) if head_dim == 128 else BackwardTiles(128, 2, 2)


# --- descriptors -----------------------------------------------------------------------------------------------------
def _block(t: torch.Tensor, rows: int, columns: int = 0) -> Block:
    strides = [t.shape[-1] if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return Block(tuple(t.shape), (*strides, 1), (1, 1, rows, columns or t.shape[-1]))


def _addressable(t: torch.Tensor) -> bool:
    """Whether a descriptor can address the rows: everything a multiple of 16 bytes, and no axis expanded."""
    strides, each = _block(t, 1).strides, 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and all(stride > 0 and stride % each == 0 for stride in strides[:-1])


def _input(t: torch.Tensor) -> torch.Tensor:
    return t if _addressable(t) else t.clone(memory_format=torch.contiguous_format)


# --- launches --------------------------------------------------------------------------------------------------------
def _numbers(d: AttentionDescriptor) -> tuple[int, int, int]:
    """Lengths, and the key that row 0 is level with."""
    return d.q_length, d.k_length, d.options.offset(d.q_length, d.k_length)


@kept
def _forward(
    d: AttentionDescriptor, blocks: tuple[Block, ...], dtype: torch.dtype, tile: ForwardTiles, most: int
) -> BlockLauncher:
    per_head = -(-d.q_length // (64 * tile.consumers))
    options, scale = d.options, float(d.options.scale or 0.0)
    fixed = (tile.consumers, tile.keys, d.head_dim, tile.stages, options.causal)
    total = per_head * d.heads * d.batch
    tail = (*_numbers(d), d.heads, d.groups, per_head, total, scale * steps.LOG2E, *fixed)
    # A program for each processor, or for each tile where there are fewer.
    specification = Specification(tail, min(total, most), 4, None, tile.registers)
    return BlockLauncher(gluon_forward.attention_forward_hopper, specification, blocks)


def forward(d: AttentionDescriptor, a: Arguments, config: ForwardTiles | None = None) -> None:
    """Fill o and lse; `config` overrides the rule."""
    tile = config or forward_tiles(d.head_dim)
    outputs = Outputs(a)
    q, k, v, o = _input(a["q"]), _input(a["k"]), _input(a["v"]), outputs["o"]
    lse = a["lse"] if a["lse"].is_contiguous() else torch.empty_like(a["lse"], memory_format=torch.contiguous_format)
    blocks = (_block(q, 64), _block(k, tile.keys), _block(v, tile.keys), _block(o, 64))
    _forward(d, blocks, q.dtype, tile, processors(q))(q, k, v, o, lse)
    outputs.done()
    if lse is not a["lse"]:
        a["lse"].copy_(lse)
    faults.after_launch(q.device)


@kept
def _backward(
    d: AttentionDescriptor, pitch: int, blocks: tuple[Block, ...], dtype: torch.dtype, tile: BackwardTiles
) -> BlockLauncher:
    per_head, kv_heads = -(-d.k_length // TILE_KEYS), d.heads // d.groups
    options, scale = d.options, float(d.options.scale or 0.0)
    sizes = (d.batch * d.heads * pitch, pitch, *_numbers(d), kv_heads, d.groups, per_head)
    fixed = (d.head_dim, *tile[:3], options.causal, tile.dk_first)
    tail = (*sizes, scale, scale * steps.LOG2E, *fixed)
    specification = Specification(tail, per_head * kv_heads * d.batch, 4, None, 168)
    return BlockLauncher(gluon_backward.attention_backward_hopper, specification, blocks)


def backward(d: Any, a: Arguments, config: BackwardTiles | None = None) -> None:
    """Fill dq, dk and dv; `config` overrides the rule."""
    tile = config or backward_tiles(d.head_dim)
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    do, q, k, v, o = (_input(a[name]) for name in ("do", "q", "k", "v", "o"))
    dq, dk, dv = outputs["dq"], outputs["dk"], outputs["dv"]
    bounds = rows_launch.fill_bounds(p, k, v, x)
    rows = rows_launch.fill_rows(p, o, do, a["lse"], a.get("dlse"), x, bounds)
    integers = torch.zeros(d.q_shape, dtype=torch.int32, device=q.device)
    blocks = (
        _block(q, tile.queries),
        _block(k, 64),
        _block(v, 64),
        _block(do, tile.queries),
        _block(dk, 64),
        _block(dv, 64),
        _block(integers, 64, 64),
    )
    _backward(d, p.pitch, blocks, q.dtype, tile)(q, k, v, do, dk, dv, integers, rows, bounds)
    rows_launch.fixed_to_float(p, integers, rows, bounds, dq, x)
    outputs.done()
    faults.after_launch(q.device)
