"""The modules: torch's own, computed by isograd."""

import torch
from torch import Tensor

from isograd.torch import functional


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` on isograd's kernels; `dim` has to be given. Shapes, dtypes and errors as `softmax`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Softmax of `input` along the module's `dim`."""
        return functional.softmax(input, self.dim)  # type: ignore[arg-type]


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` on isograd's kernels; `dim` has to be given. Shapes, dtypes and errors as `log_softmax`."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logarithm of the softmax of `input` along the module's `dim`."""
        return functional.log_softmax(input, self.dim)  # type: ignore[arg-type]
