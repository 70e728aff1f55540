"""Dropout in place of torch's functions, with a mask that belongs to the samples of a step."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.torch.dot_product import drawn
from isograd.torch.exported import dropout as by_numbers
from isograd.torch.tensors import require_tensor

_WORD = (1 << 64) - 1


def checked_samples(name: str, samples: Any) -> None:
    """Raise for what does not say which samples of a step a block has."""
    if samples is None:
        return
    if not isinstance(samples, range) or samples.step != 1 or not samples or samples.start < 0:
        raise InvalidProblemError(f"{name}: samples is {samples!r}; accepted: range(first, stop) of one or more, None")


def dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    samples: range,
) -> Tensor:
    """`torch.nn.functional.dropout` of a tensor that holds these samples of a step one after the other."""
    name = "dropout"
    require_tensor(name, input, "input")
    if not training:
        return input
    if torch.compiler.is_compiling():
        raise UnsupportedError(f"{name}: torch.compile traces it, and a seed is drawn at every call")
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{name}: a CUDA graph is captured, and a seed is drawn at every call")
    size, left = divmod(input.numel(), len(samples))
    if left:
        raise UnsupportedError(
            f"{name}: input has {input.numel()} elements; accepted: as many for each of {len(samples)} samples"
        )
    seed = drawn()
    if is_functorch_wrapped_tensor(seed):
        raise UnsupportedError(f"{name}: vmap draws a number for each of its members; accepted: calls outside of it")
    y = by_numbers(input, p, seed=int(seed) & _WORD, offset=samples.start * size & _WORD)
    return input.copy_(y) if inplace else y


def torch_dropout(input: Tensor, p: float, train: bool, *, samples: range) -> Tensor:  # noqa: A002
    """`torch.dropout`."""
    return dropout(input, p, train, samples=samples)
