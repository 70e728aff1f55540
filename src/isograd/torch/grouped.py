"""Order-free linear layers of several experts, each on rows of its own."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.torch.indexing import enter, index_select
from isograd.torch.ops_grouped import GROUPED_MATMUL
from isograd.torch.ops_matmul import ADD_TO_ROWS
from isograd.torch.products import Precision, checked_precision, linear
from isograd.torch.tensors import INDEX_DTYPES, require_dense, require_device, require_same_dtype

_NAME = "grouped_linear"


def _checked_ends(offsets: Tensor | Sequence[int], experts: int, rows: int) -> list[int]:
    """The offsets as numbers, which waits for a GPU that has them."""
    if isinstance(offsets, Tensor):
        if offsets.dtype not in INDEX_DTYPES or offsets.dim() != 1:
            raise InvalidProblemError(
                f"{_NAME}: offsets is {offsets.dtype} with shape {tuple(offsets.shape)}; expected integers of one axis"
            )
        offsets = offsets.tolist()
    try:
        ends: list[Any] = [end if isinstance(end, (int, torch.SymInt)) else operator.index(end) for end in offsets]
    except (TypeError, RuntimeError):
        raise InvalidProblemError(f"{_NAME}: offsets is {offsets!r}; expected integers of one axis") from None
    if len(ends) != experts + 1:
        raise InvalidProblemError(f"{_NAME}: {len(ends)} offsets for {experts} experts; expected one more")
    if ends[0] != 0 or ends[-1] != rows or any(a > b for a, b in itertools.pairwise(ends)):
        raise InvalidProblemError(
            f"{_NAME}: offsets go from {ends[0]} to {ends[-1]} for {rows} rows; expected 0 to {rows} without a decrease"
        )
    return ends


def _in_one_product(x: Tensor, weight: Tensor, offsets: Tensor | Sequence[int], bias: Tensor | None) -> Tensor:
    """All experts by one product of 16-bit integers on a GPU, which is not waited for where it has the offsets."""
    experts, rows = weight.shape[0], x.shape[0]
    if not (isinstance(offsets, Tensor) and offsets.device == x.device):
        ends = torch.tensor(_checked_ends(offsets, experts, rows), dtype=torch.int64)
        offsets = ends.pin_memory().to(x.device, non_blocking=True)
    elif offsets.dtype not in INDEX_DTYPES or offsets.shape != (experts + 1,):
        raise InvalidProblemError(
            f"{_NAME}: offsets is {offsets.dtype} with shape {tuple(offsets.shape)}; expected integers, "
            f"{experts + 1} for {experts} experts"
        )
    found: Tensor = GROUPED_MATMUL(x, weight.mT, offsets, True)
    if bias is not None:
        every = torch.arange(rows, device=x.device)
        of_rows = torch.searchsorted(offsets.long()[1:].contiguous(), every, right=True).clamp_(max=experts - 1)
        own = index_select(bias, 0, of_rows)
        size = found.numel()
        found = ADD_TO_ROWS(found.reshape(1, size), own.reshape(size)).view(found.shape)
    return found


def grouped_linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | Sequence[int],
    bias: Tensor | None = None,
    *,
    precision: Precision | None = None,
) -> Tensor:
    """`igt.linear` of each expert on its rows: rows offsets[e] to offsets[e + 1] with weight[e] and bias[e].

    input: [rows, features], sorted by expert, as `moe_permute` sorts them. weight: [experts, outputs, features], bias:
    [experts, outputs], of input's dtype. offsets: [experts + 1], from 0 to rows, not decreasing; an expert may have no
    row. The tensor of `expert_permutation`, or numbers. precision: as for `matmul`.

    On a GPU all experts are one product, and a tensor of its own is not waited for: where such offsets do not fit, the
    result is NaN and `isograd.check` raises IndexOutOfRangeError.

    The bits, also of the gradients, are those of each expert alone: neither the others nor how many rows they have
    change one. Differentiable any number of times.

    Raises InvalidProblemError for offsets that do not fit; otherwise as `linear`.
    """
    enter(_NAME)
    given = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        require_dense(_NAME, tensor, name)
        require_same_dtype(_NAME, tensor, name, input, "input")
    require_device(_NAME, **given)
    checked_precision(_NAME, precision, input)
    fits = input.dim() == 2 and weight.dim() == 3 and input.shape[1] == weight.shape[2]
    if not fits or (bias is not None and bias.shape != weight.shape[:2]):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given.values())
        raise InvalidProblemError(
            f"{_NAME}: {', '.join(given)} have shapes {shapes}; expected [rows, features], [experts, outputs, "
            "features] and [experts, outputs]"
        )
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    # Numbers that are traced may stand for others.
    known = isinstance(offsets, Tensor) or not torch.compiler.is_compiling()
    if input.is_cuda and weight.shape[0] and known and (precision == "int16" or (precision is None and narrow)):
        return _in_one_product(input, weight, offsets, bias)
    ends = _checked_ends(offsets, weight.shape[0], input.shape[0])
    parts = torch.split(input, [end - start for start, end in itertools.pairwise(ends)])
    biases = (None,) * len(parts) if bias is None else bias.unbind()
    found = [
        linear(part, one, own, precision=precision)
        for part, one, own in zip(parts, weight.unbind(), biases, strict=True)
    ]
    return torch.cat(found) if found else input.new_empty(0, weight.shape[1])
