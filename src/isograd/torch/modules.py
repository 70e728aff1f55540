"""The modules: torch's own, computed by isograd."""

import torch
from torch import Tensor

from isograd.ops.kl_div.torch import kl_div
from isograd.ops.softmax.torch import log_softmax, softmax
from isograd.torch import losses
from isograd.torch.tensors import refuse
from isograd.typing import BatchReduction, Reduction


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` on isograd's kernels; `dim` has to be given. Shapes, dtypes and errors as `softmax`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Softmax of `input` along the module's `dim`."""
        return softmax(input, self.dim)  # type: ignore[arg-type]


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` on isograd's kernels; `dim` has to be given. Shapes, dtypes and errors as `log_softmax`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logarithm of the softmax of `input` along the module's `dim`."""
        return log_softmax(input, self.dim)  # type: ignore[arg-type]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` on isograd's kernels, with a z-loss. Arguments and errors as `cross_entropy`."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
    ) -> None:
        refuse("cross_entropy", None, size_average=size_average, reduce=reduce)
        super().__init__(weight, None, ignore_index, None, reduction, label_smoothing)
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        """Cross entropy of the logits `input` and `target`."""
        return losses.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,  # type: ignore[arg-type]  # torch says str
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )


class KLDivLoss(torch.nn.KLDivLoss):
    """`torch.nn.KLDivLoss` on isograd's kernels. Arguments and errors as `kl_div`."""

    def __init__(
        self,
        size_average: None = None,
        reduce: None = None,
        reduction: BatchReduction = "mean",
        log_target: bool = False,
    ) -> None:
        refuse("kl_div", None, size_average=size_average, reduce=reduce)
        super().__init__(None, None, reduction, log_target)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        """Divergence of `target` from the log-probabilities `input`."""
        return kl_div(
            input,
            target,
            reduction=self.reduction,  # type: ignore[arg-type]  # torch says str
            log_target=self.log_target,
        )
