"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.distillation_loss.api import (
    distillation_loss,
)
from isograd.ops.gumbel_softmax.api import (
    gumbel_softmax,
)
from isograd.ops.kl_div.api import (
    kl_div,
)
from isograd.ops.layernorm.api import (
    layernorm,
)
from isograd.ops.rmsnorm.api import (
    rmsnorm,
)
from isograd.ops.softmax.api import (
    log_softmax,
    softmax,
)
from isograd.ops.sparsemax.api import (
    sparsemax,
)

__all__ = [
    "distillation_loss",
    "gumbel_softmax",
    "kl_div",
    "layernorm",
    "log_softmax",
    "rmsnorm",
    "softmax",
    "sparsemax",
]
