"""Pieces of a sequence on the ranks of a group: what ranks gather, and what a rank computes of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isograd.torch.distributed.buckets import gather
from isograd.torch.ops_attention import rows_like
from isograd.torch.tensors import empty

STEP = 384  # a multiple of the tiles of every attention kernel, of queries and of keys


class Cut(NamedTuple):
    """Rows first to end of one side, the rows of the other side that they need, and the window between them.

    Counted from `first` and `other_first`, row i reaches the rows i - before to i + after of the other side, None: all.
    """

    first: int
    end: int
    other_first: int
    other_end: int
    before: int | None
    after: int | None


def _down(row: int) -> int:
    return row // STEP * STEP


def _up(row: int) -> int:
    return -(-row // STEP) * STEP


class Pieces(NamedTuple):
    """The lengths of the pieces in the order of the ranks, and which is this rank's; no group: one process."""

    group: Any
    lengths: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return sum(self.lengths[: self.rank])

    @property
    def length(self) -> int:
        """The rows of this rank."""
        return self.lengths[self.rank]

    @property
    def total(self) -> int:
        """The rows of all ranks."""
        return sum(self.lengths)

    def cut(self, before: int | None, after: int | None, whole: bool = False) -> Cut:
        """What gives this rank's rows of a result the bits that they have among all rows.

        Row i of the one side, queries or keys, reaches the rows i - before to i + after of the other. What is cut out
        begins and ends where a tile of every kernel does, or the sequence: tiles hold what they hold in the whole. Rows
        may be added in front, so that no row of the other side lies before those that the first one reaches: kernels
        have no window that begins behind its diagonal. whole: with all rows of the other side.
        """
        if not self.length:
            return Cut(self.first, self.first, 0, 0, None, None)
        first, end = _down(self.first), min(_up(self.first + self.length), self.total)
        other_first, other_end = 0, self.total
        if after is not None and not whole:
            other_end = min(_up(end + after), self.total)
        if before is not None:
            if whole:
                first = min(first, _down(before))
            else:
                first = max(first - STEP, 0) if before % STEP else first
                other_first = max(first - _down(before), 0)
        shift = first - other_first
        before, after = (None if before is None else before - shift), (None if after is None else after + shift)
        return Cut(first, end, other_first, other_end, before, after)

    def place(self, x: Tensor, cut: Cut) -> Tensor:
        """Rows of this rank, [B, H, L] or [B, H, L, D], among those of a cut, where the others are zeros."""
        if cut.end - cut.first == self.length:
            return x
        if x.dim() == 3:
            return self.place(x[..., None], cut)[..., 0]
        found = rows_like(x, length=cut.end - cut.first).zero_()
        self.own(found, cut).copy_(x)
        return found

    def own(self, x: Tensor, cut: Cut) -> Tensor:
        """The rows of this rank in a result for a cut."""
        return x.narrow(2, self.first - cut.first, self.length)

    def gather(self, x: Tensor) -> Tensor:
        """The rows [B, H, L, ...] of all ranks; a collective call. In memory the rows lie outside."""
        most = max(self.lengths)
        rows = x.movedim(2, 0)
        if self.group is None or not most * rows.shape[1:].numel():
            return x
        if self.length == most:
            mine = rows.contiguous()
        else:
            mine = empty((most, *rows.shape[1:]), x)
            mine[: self.length] = rows
        everyone = empty((len(self.lengths), *mine.shape), x)
        gather(everyone.flatten(0, 1), mine, group=self.group)
        pieces = [piece[:length] for piece, length in zip(everyone.unbind(), self.lengths, strict=True)]
        whole = everyone.flatten(0, 1) if self.total == most * len(pieces) else torch.cat(pieces)
        return whole.movedim(0, 2)
