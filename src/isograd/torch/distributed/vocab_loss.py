"""Cross entropy of logits whose classes are spread over ranks, with the bits of whole rows."""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isograd.core import arrays
from isograd.errors import InvalidProblemError, IsogradError
from isograd.losses import reductions
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, Scalars, check_targets, scalars
from isograd.losses.cross_entropy_reference import IGNORE_INDEX
from isograd.torch import tensors
from isograd.torch.distributed.vocab_kernels import of
from isograd.torch.distributed.vocab_layout import LOG_PROBABILITIES
from isograd.torch.distributed.vocab_parts import Part, agreed, checked_part, given_group
from isograd.torch.indexing import enter
from isograd.typing import Reduction

_NAME = "vocab_parallel_cross_entropy"
_ELSEWHERE = -2  # the mark of a target among other ranks' classes, beside -1 of an ignored row
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Descriptor(CrossEntropyDescriptor):
    """The whole problem; its errors name the function that was called."""

    name: ClassVar[str] = _NAME


class _Call(NamedTuple):
    """What is the same in both passes."""

    part: Part
    whole: _Descriptor
    targets: Tensor
    numbers: Scalars
    reduction: str

    def divisor(self) -> Any:
        """What a mean divides by."""
        whole = self.whole
        return reductions.target_total(
            _NAME, self.targets, None, whole.classes, whole.ignore_index, whole.work
        )  # fmt: skip


class _CrossEntropy(torch.autograd.Function):
    """The loss of rows; `here` has the targets among this rank's classes, and marks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, here: Tensor, call: _Call) -> Tensor:
        part, classes, kernels = call.part, call.part.classes, of(logits)
        keys = part.largest(kernels.maxima(logits))
        words = kernels.exponentials(logits, keys, classes)
        bits = _BITS[logits.element_size()]
        if logits.numel():
            # Bits of the one rank that has the class, zeros of all others: their sum is the logit, whatever it is.
            own = logits.gather(1, here.clamp(min=0)[:, None])[:, 0].view(bits)
            words[:, -1] = torch.where(here >= 0, own, 0)
        words = part.added(words)
        own = words[:, -1].to(bits).contiguous().view(logits.dtype)
        about = kernels.statistics(logits, keys, words, classes)
        everything = part.total(LOG_PROBABILITIES, logits, logits, about) if call.numbers.spread else None
        losses, state = kernels.losses(own, here, about, everything, call.whole, call.numbers)
        ctx.save_for_backward(logits, here, state)
        ctx.call = call
        loss: Tensor = reductions.reduced(_NAME, losses, call.whole.work, logits, call.reduction, call.divisor)
        return loss.to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        logits, here, state = ctx.saved_tensors
        call: _Call = ctx.call
        g = tensors.usable(_NAME, "dloss", dloss.to(tensors.work_dtype(logits.dtype))).view(dloss.shape)
        about = (call.whole.work, logits, here.shape, call.reduction, call.divisor)
        dlosses = reductions.row_gradients(_NAME, g, *about)
        given = (logits, here, dlosses, state, call.whole, call.numbers)
        return of(logits).logit_gradients(*given), None, None


def _checked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Any, str]:
    """(logits, targets, those on the CPU, a digest of them); raises for what does not fit."""
    logits = checked_part(_NAME, "logits", logits)
    targets = tensors.checked_index(_NAME, targets, "targets")
    tensors.require_device(_NAME, logits=logits, targets=targets)
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise InvalidProblemError(
            f"{_NAME}: logits have shape {tuple(logits.shape)} and targets {tuple(targets.shape)}; expected "
            "(tokens, classes of this rank) and (tokens,)"
        )
    if torch.is_autocast_enabled(logits.device.type):
        (logits,) = tensors.wide(logits)
    targets = tensors.usable_index(_NAME, "targets", targets.detach())
    flat = np.ascontiguousarray(arrays.numpy_view(targets.cpu()), np.int64)
    return logits, targets, flat, hashlib.sha256(flat.tobytes()).hexdigest()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Any = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`igt.cross_entropy` of logits whose classes are spread over the ranks of a group: the same loss on every rank.

    logits: [tokens, classes of this rank]; float16, bfloat16, float32 or float64, any strides. The parts follow each
    other in the order of the ranks; they may have different sizes, and a rank none. targets: [tokens], indices among
    the classes of all ranks, the same on all. The options are those of `igt.cross_entropy`, and the same on all ranks.
    group: by default all ranks, or none where `torch.distributed` is not initialized. A call is a collective of the
    group; the backward pass is not, and gives the gradient of this rank's logits.

    The bits of loss and gradient are those of `igt.cross_entropy` of the whole logits, for any number of ranks and any
    parts. Ranks exchange the maxima of rows, and then the exact integers of the sums of exponentials with the bits of
    the targets' logits, 40 bytes a token; label smoothing doubles that. Differentiable once.

    Raises, on all ranks: InvalidProblemError if they differ in tokens, dtype, targets or options;
    IndexOutOfRangeError for a target that is no class; otherwise as `igt.cross_entropy`, with InvalidProblemError on
    ranks whose own arguments are right. UnsupportedError for a device without kernels; CPUs and CUDA devices have them,
    of which the latter are waited for, as all ranks look at the targets.
    """
    enter(_NAME)
    group, failed, said = given_group(_NAME, group), None, ""
    try:
        logits, targets, flat, said = _checked(logits, targets)
    except IsogradError as error:
        failed = error
    of = None if failed else (logits.shape[0], str(logits.dtype))
    options = (ignore_index, label_smoothing, z_loss, reduction)
    part = agreed(_NAME, group, logits, failed, {"tokens or dtypes": of, "targets": said, "options": options})
    reductions.checked_reduction(_NAME, reduction)
    shape = (logits.shape[0], part.classes)
    fields = (shape, tensors.NAMES[logits.dtype], "int64", 1, False, ignore_index, label_smoothing, z_loss)
    whole = _Descriptor(*fields).validated()
    wanted = torch.from_numpy(check_targets(_NAME, flat, whole.classes, whole.ignore_index))
    inside = (wanted >= part.first) & (wanted < part.first + logits.shape[1])
    here = torch.where(inside, wanted - part.first, torch.where(wanted < 0, wanted, _ELSEWHERE)).to(logits.device)
    call = _Call(part, whole, targets, scalars(whole, None), reduction)
    return _CrossEntropy.apply(logits, here, call)  # type: ignore[no-any-return,no-untyped-call]
