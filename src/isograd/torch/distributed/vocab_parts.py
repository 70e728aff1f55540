"""Consecutive parts of the classes on the ranks of a group: what the ranks agree on, and what they add up."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from isograd.errors import IsogradError, UnsupportedError
from isograd.torch import tensors
from isograd.torch.distributed.agreement import agree, carrier, checked_group
from isograd.torch.distributed.vocab_kernels import of, require_kernels


class Part(NamedTuple):
    """A rank's part: its first class, and the classes of all ranks of the group, which is None for one process."""

    group: Any
    first: int
    classes: int

    def largest(self, keys: Tensor) -> Tensor:
        """The largest of the ranks' keys, in their place."""
        if self.group is not None and keys.numel():
            dist.all_reduce(keys, dist.ReduceOp.MAX, group=self.group)
        return keys

    def added(self, words: Tensor) -> Tensor:
        """The sums of the ranks' words, in their place."""
        if self.group is not None and words.numel():
            dist.all_reduce(words, group=self.group)
        return words

    def total(self, mode: int, x: Tensor, y: Tensor, about: Tensor) -> Tensor:
        """The order-free sums of whole rows' terms."""
        kernels = of(x)
        keys = self.largest(kernels.magnitudes(mode, x, y, about))
        found: Tensor = kernels.totals(x, keys, self.added(kernels.terms(mode, x, y, about, keys)))
        return found


def given_group(name: str, group: Any) -> Any:
    """The group that was given, by default all ranks where there are any."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return checked_group(name, group)


def checked_part(name: str, argument: str, x: Any) -> Tensor:
    """A plain tensor of a storage type with a last axis, on a device that has kernels."""
    tensors.require_dense(name, x, argument)
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise UnsupportedError(f"{name}: {argument} is a {type(x).__name__}; pass the plain tensor of this rank")
    if is_functorch_wrapped_tensor(x):
        raise UnsupportedError(f"{name}: {argument} is transformed by torch.func; accepted: backward of torch.autograd")
    require_kernels(name, x.device)
    return tensors.usable(name, argument, x)


def agreed(name: str, group: Any, x: Any, failed: IsogradError | None, what: Mapping[str, Any]) -> Part:
    """The part of this rank, after all ranks have said the same and none has failed; a collective call.

    The CPU waits for it: without it, ranks that differ would wait for each other for ever.
    """
    classes = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 0
    if group is None:
        if failed is not None:
            raise failed
        return Part(None, 0, classes)
    sizes = agree(name, [group], carrier(group, x), failed, what, classes)
    return Part(group, sum(sizes[: dist.get_rank(group)]), sum(sizes))
