"""Launching the Hopper kernels."""

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isograd.attention import gluon_backward, gluon_forward
from isograd.triton_launcher import processors

_LOG2E = 1.4426950408889634


class ForwardTiles(NamedTuple):
    consumers: int
    keys: int
    stages: int
    turns: bool
    persistent: bool


def forward_tiles(head_dim: int) -> ForwardTiles:
    return ForwardTiles(2, 128, 2, False, False)


class BackwardTiles(NamedTuple):
    rows: int
    q_stages: int
    stages: int


def backward_tiles(head_dim: int) -> BackwardTiles:
    return BackwardTiles(64, 2, 2) if head_dim == 128 else BackwardTiles(128, 2, 2)


def _described(x: torch.Tensor, rows: int, columns: int = 0) -> TensorDescriptor:
    block = [1, 1, rows, columns or x.shape[3]]
    bits = x.element_size() * 8
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout(128, bits, 4))


def launch_forward(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, offset: int, tiles: Any, warmup: bool = False) -> Any:
    batch, heads, lq, head_dim = q.shape
    c = tiles.consumers
    count = -(-lq // (64 * c))
    total = count * batch * heads
    grid = min(total, processors(q)) if tiles.persistent else total
    kernel: Any = gluon_forward.forward
    run = functools.partial(kernel.warmup, grid=(grid,)) if warmup else kernel[(grid,)]
    return run(
        _described(q, 64),
        _described(k, tiles.keys),
        _described(v, tiles.keys),
        _described(o, 64),
        lse,
        lq,
        k.shape[2],
        offset,
        heads,
        heads // k.shape[1],
        count,
        total,
        scale * _LOG2E,
        CONSUMERS=c,
        N=tiles.keys,
        D=head_dim,
        STAGES=tiles.stages,
        CAUSAL=causal,
        TURNS=tiles.turns,
        num_warps=4,
        maxnreg=168 if c == 2 else 128,
        enable_fp_fusion=False,
    )


def launch_backward(
    q: Any, k: Any, v: Any, do: Any, dk: Any, dv: Any, fixed: Any, rows: Any, bounds: Any, scale: float, causal: bool,
    offset: int, tiles: Any, warmup: bool = False,
) -> Any:
    batch, heads, lq, head_dim = q.shape
    kv_heads, lk = k.shape[1:3]
    count = -(-lk // 128)
    grid = count * batch * kv_heads
    kernel: Any = gluon_backward.backward
    run = functools.partial(kernel.warmup, grid=(grid,)) if warmup else kernel[(grid,)]
    return run(
        _described(q, tiles.rows),
        _described(k, 64),
        _described(v, 64),
        _described(do, tiles.rows),
        _described(dk, 64),
        _described(dv, 64),
        _described(fixed, 64, 64),
        rows,
        bounds,
        batch * heads * lq,
        lq,
        lk,
        offset,
        kv_heads,
        heads // kv_heads,
        count,
        scale,
        scale * _LOG2E,
        D=head_dim,
        ROWS=tiles.rows,
        Q_STAGES=tiles.q_stages,
        STAGES=tiles.stages,
        CAUSAL=causal,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=False,
    )
