"""Keys and values in a cache as packed sequences, which the forward pass on Hopper takes.

Every sequence is two: its queries with the keys that it has, and no queries with the room behind these. Where a cache
lies such that its keys are tokens of one sequence of rows it is seen so; pages, and other caches, are copied.
"""

from typing import Any, NamedTuple

import torch

from isograd.flash_attention.descriptors import AttentionDescriptor, AttentionWithCacheDescriptor
from isograd.flash_attention.triton_problem import Arguments


class Packed(NamedTuple):
    """The problem of packed sequences, its arguments, and which of the sequences (-1) are NaN."""

    descriptor: AttentionDescriptor
    arguments: dict[str, torch.Tensor]
    used: torch.Tensor

    def unpack(self, a: Arguments) -> None:
        """Fill o and lse of the cache's problem."""
        batch, heads, length, size = a["o"].shape
        wrong = (self.used < 0)[:, None, None]
        o = self.arguments["o"][0].view(heads, batch, length, size).transpose(0, 1)
        lse = self.arguments["lse"][0].view(heads, batch, length).transpose(0, 1)
        a["o"].copy_(o.masked_fill(wrong[..., None], torch.nan))
        a["lse"].copy_(lse.masked_fill(wrong, torch.nan))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] as [1, H, B L, D], copied unless heads are inside the length."""
    batch, heads, length, size = x.shape
    return x.transpose(1, 2).reshape(1, batch * length, heads, size).transpose(1, 2)


def _pitch(x: torch.Tensor) -> int:
    """The rows from one element of the batch to the next, or 0 where they are not rows of one sequence."""
    batch, _, length, _ = x.shape
    each, row = x.stride(0), x.stride(2)
    if batch == 1 or length == 1:
        return length if batch == 1 else 0
    return each // row if row > 0 and each % row == 0 and each // row >= length else 0


def _tokens(k: torch.Tensor, v: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K and v [B, Hkv, K, size] as rows of one sequence [1, Hkv, tokens, size], and the pitch of both."""
    batch, heads, length, _ = k.shape
    pitch = _pitch(k)
    if not pitch or _pitch(v) != pitch or batch * pitch > most:
        return _rows(k), _rows(v), length
    seen = [
        x.as_strided((1, heads, (batch - 1) * pitch + length, x.shape[3]), (0, x.stride(1), x.stride(2), 1))
        for x in (k, v)
    ]
    return seen[0], seen[1], pitch


def _gathered(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The pages of each sequence [B, Hkv, K, size]; numbers of pages that are not there give some page."""
    rows = x[table.clamp(0, x.shape[0] - 1).long()]  # [B, pages, Hkv, page_size, size]
    return rows.transpose(1, 2).flatten(2, 3)


def packed(d: AttentionWithCacheDescriptor, a: Arguments, used: torch.Tensor, table: torch.Tensor, most: int) -> Packed:
    """The same as packed sequences. used, table: of `triton_launch.used_keys`; most: tokens that there may be."""
    k, v = a["k"], a["v"]
    if d.page_size is not None:
        k, v = _gathered(k, table), _gathered(v, table)
    k, v, pitch = _tokens(k, v, most)
    q = _rows(a["q"])
    first = torch.arange(d.batch, dtype=torch.int32, device=q.device)
    total = torch.full((1,), k.shape[2], dtype=torch.int32, device=q.device)
    ends = torch.stack([first * pitch, first * pitch + used.clamp(0)], 1).flatten()
    rows = torch.stack([first * d.q_length, (first + 1) * d.q_length], 1).flatten()
    descriptor = AttentionDescriptor(
        1, d.heads, d.kv_heads, q.shape[2], k.shape[2], d.head_dim, d.v_dim, d.dtype, d.options,
        sequences=2 * d.batch, sinks_dtype=d.sinks_dtype,
    )  # fmt: skip
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_k": torch.cat([ends, total])}
    given["cu_seqlens_q"] = torch.cat([rows, rows[-1:]])
    if "sinks" in a:
        given["sinks"] = a["sinks"]
    given["o"] = q.new_empty((1, q.shape[2], d.heads, d.v_dim)).transpose(1, 2)
    given["lse"] = torch.empty((1, d.heads, q.shape[2]), dtype=torch.float32, device=q.device)
    return Packed(descriptor, given, used)
