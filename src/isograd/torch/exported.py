"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.activation.torch import (
    gelu,
    silu,
)
from isograd.ops.distillation_loss.torch import (
    distillation_loss,
)
from isograd.ops.dropout.torch import (
    dropout,
)
from isograd.ops.gated.torch import (
    geglu,
    gelu_mul,
    silu_mul,
    swiglu,
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
from isograd.ops.rotary.torch import (
    rotary,
)
from isograd.ops.router.torch import (
    expert_counts,
    expert_permutation,
    load_balancing_loss,
    moe_combine,
    moe_permute,
    moe_router,
    renormalize,
    router_z_loss,
    topk,
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
    "dropout",
    "expert_counts",
    "expert_permutation",
    "geglu",
    "gelu",
    "gelu_mul",
    "gumbel_softmax",
    "kl_div",
    "layer_norm",
    "load_balancing_loss",
    "log_softmax",
    "log_softmax_backward",
    "moe_combine",
    "moe_permute",
    "moe_router",
    "renormalize",
    "rms_norm",
    "rotary",
    "router_z_loss",
    "silu",
    "silu_mul",
    "softmax",
    "softmax_backward",
    "sparsemax",
    "swiglu",
    "topk",
]
