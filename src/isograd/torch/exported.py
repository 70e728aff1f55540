"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.distillation_loss.torch import (
    distillation_loss,
)
from isograd.ops.gumbel_softmax.torch import (
    gumbel_softmax,
)
from isograd.ops.kl_div.torch import (
    kl_div,
)
from isograd.ops.layernorm.torch import (
    layer_norm,
)
from isograd.ops.rmsnorm.torch import (
    rms_norm,
)
from isograd.ops.softmax.torch import (
    log_softmax,
    log_softmax_backward,
    softmax,
    softmax_backward,
)
from isograd.ops.sparsemax.torch import (
    sparsemax,
)

__all__ = [
    "distillation_loss",
    "gumbel_softmax",
    "kl_div",
    "layer_norm",
    "log_softmax",
    "log_softmax_backward",
    "rms_norm",
    "softmax",
    "softmax_backward",
    "sparsemax",
]
