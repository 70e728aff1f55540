"""Whether ranks agree: a digest of what each has, compared before anything is added up."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from isograd.errors import InvalidProblemError, IsogradError

_WORDS = 4


def _digest(what: Any) -> list[int]:
    found = hashlib.sha256(repr(what).encode()).digest()
    return [int.from_bytes(found[8 * i : 8 * i + 8], "little", signed=True) for i in range(_WORDS)]


def checked_group(name: str, group: Any) -> Any:
    """The group, or None; InvalidProblemError for anything else, and for a group without this rank."""
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise InvalidProblemError(f"{name}: group is {group!r}; expected a process group with this rank")
    return group


def carrier(group: Any, x: Any) -> torch.device:
    """The device whose tensors say what a rank has; x: what the ranks have a part of, or what has failed."""
    # A tensor of another device has failed, and no collective may take it.
    device = x.device if isinstance(x, torch.Tensor) and x.device.type == "cuda" else torch.device("cpu")
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # which carries no more than errors then
        return torch.device("cuda", torch.cuda.current_device())
    return device


def agree(
    name: str,
    groups: Sequence[Any],
    device: torch.device,
    failed: IsogradError | None,
    what: Mapping[str, Any],
    number: int = 0,
) -> list[int]:
    """Raise on every rank of the groups unless all have the same; a collective call.

    failed: the error that this rank is about to raise, which the others are told of. number: of this rank's own.

    Returns the numbers of the ranks, group by group.
    """
    mine = [word for value in what.values() for word in ([0] * _WORDS if failed else _digest(value))]
    words = torch.tensor([*mine, number], dtype=torch.int64, device=device)
    numbers: list[int] = []
    broken: list[int] = []
    apart: list[tuple[str, list[int]]] = []
    for group in groups:
        everyone = [torch.empty_like(words) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, words, group=group)
        ranks = dist.get_process_group_ranks(group)
        found = [theirs.tolist() for theirs in everyone]
        numbers += [theirs.pop() for theirs in found]
        broken += [rank for rank, theirs in zip(ranks, found, strict=True) if not any(theirs)]
        for i, key in enumerate(what):
            first, *others = (theirs[_WORDS * i : _WORDS * (i + 1)] for theirs in found)
            if other := [rank for rank, theirs in zip(ranks[1:], others, strict=True) if theirs != first]:
                apart.append((key, other))
    if failed is not None:
        raise failed
    if broken:
        raise InvalidProblemError(f"{name}: refused on rank {', '.join(map(str, broken))}, whose error says why")
    if apart:
        key, other = apart[0]
        ranks_said = ", ".join(map(str, other))
        raise InvalidProblemError(f"{name}: {key} of rank {ranks_said} differ from the first rank's; expected the same")
    return numbers
