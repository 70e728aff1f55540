"""linear_cross_entropy on a GPU: chunks of rows, products by torch, cross entropy in place of a chunk's logits.

The gradient of the weight is added up over the chunks, for 16-bit weights in binary32, and rounded once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from isograd import faults
from isograd.losses.cross_entropy_plans import CrossEntropyGradientDescriptor
from isograd.losses.linear_plans import LinearDescriptor
from isograd.losses.triton_cross_entropy_launch import cross_entropy, report_targets

_LEAST = 256  # rows that keep a matrix product busy


def chunk_rows(descriptor: LinearDescriptor) -> int:
    """Rows of a chunk: at least a quarter of the features, so that its logits take a quarter of the weight's memory.

    Fewer rows would add to the gradient of the weight, which is as large as the weight, more often than products need.
    """
    if descriptor.chunk:
        return descriptor.chunk
    return max(_LEAST, 1 << max(descriptor.features // 4 - 1, 0).bit_length())


class _WeightGradient:
    """dlogits^T @ hidden over the chunks."""

    def __init__(self, out: torch.Tensor, chunks: int) -> None:
        self._out, self._chunks = out, chunks
        short = out.dtype in (torch.float16, torch.bfloat16)
        self._sum = torch.empty_like(out, dtype=torch.float32) if short and chunks > 1 else out
        # Products of 16-bit matrices that stay in binary32 exist on CUDA alone.
        self._wide = self._sum is not out and out.is_cuda
        self._added = 0

    def add(self, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add a chunk."""
        a, b = dlogits.t(), hidden
        options: dict[str, Any] = {"out": self._sum}
        if self._wide:
            options["out_dtype"] = torch.float32
        elif self._sum is not self._out:
            a, b = a.float(), b.float()
        if self._added:
            torch.addmm(self._sum, a, b, **options)
        else:
            torch.mm(a, b, **options)
        self._added += 1

    def finish(self) -> None:
        """Round the sum into the output."""
        if not self._added:
            self._out.zero_()
        elif self._sum is not self._out:
            self._out.copy_(self._sum)


def linear_cross_entropy(descriptor: LinearDescriptor, arguments: Mapping[str, Any]) -> None:
    """Either operation on the plan's arguments, on the current stream of their device."""
    with torch.no_grad(), torch.autocast(arguments["hidden"].device.type, enabled=False):
        _compute(descriptor, arguments)
    faults.after_launch(arguments["hidden"].device)


def _compute(descriptor: LinearDescriptor, arguments: Mapping[str, Any]) -> None:
    hidden, weight, bias = arguments["hidden"], arguments["weight"], arguments.get("bias")
    gradient = "dlosses" in arguments
    step = max(min(chunk_rows(descriptor), descriptor.rows), 1)
    chunks = -(-descriptor.rows // step)
    if chunks:
        # Under the operation's own name and with the row's place among all, before a chunk does.
        report_targets(descriptor.operation, arguments["targets"], descriptor.classes, descriptor.ignore_index)
    work = arguments["losses"].dtype
    logits_of_all = torch.empty((step, descriptor.classes), dtype=hidden.dtype, device=hidden.device)
    if gradient:
        dweight = _WeightGradient(arguments["dweight"], chunks)
        dbias = torch.zeros(descriptor.classes, dtype=work, device=hidden.device)
    else:
        state = torch.empty((4, step), dtype=work, device=hidden.device)
    whole = descriptor.logits.validated()
    for start in range(0, descriptor.rows, step):
        part = slice(start, min(start + step, descriptor.rows))
        count = part.stop - part.start
        logits = logits_of_all[:count]
        torch.mm(hidden[part], weight.t(), out=logits)
        if bias is not None:
            logits += bias
        given = {"logits": logits, "targets": arguments["targets"][part], "losses": arguments["losses"][part]}
        if "class_weight" in arguments:
            given["weight"] = arguments["class_weight"]
        chunk = dataclasses.replace(whole, shape=(count, descriptor.classes))
        if not gradient:
            cross_entropy(chunk, given | {"state": state[:, :count]})
            continue
        fields = [getattr(chunk, field.name) for field in dataclasses.fields(chunk)]
        given |= {"dlosses": arguments["dlosses"][part], "dlogits": logits}
        cross_entropy(CrossEntropyGradientDescriptor(*fields), given)
        torch.mm(logits, weight, out=arguments["dhidden"][part])
        dweight.add(logits, hidden[part])
        if bias is not None:
            dbias += logits.sum(0, dtype=work)
    if gradient:
        dweight.finish()
        if bias is not None:
            arguments["dbias"].copy_(dbias)
