"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.activation.api import (
    gelu,
    silu,
)
from isograd.ops.distillation_loss.api import (
    distillation_loss,
)
from isograd.ops.dropout.api import (
    dropout,
)
from isograd.ops.gated.api import (
    geglu,
    gelu_mul,
    silu_mul,
    swiglu,
)
from isograd.ops.gumbel_softmax.api import (
    gumbel_softmax,
)
from isograd.ops.kl_div.api import (
    kl_div,
)
from isograd.ops.layernorm.api import (
    add_layernorm,
    layernorm,
)
from isograd.ops.rmsnorm.api import (
    add_rmsnorm,
    rmsnorm,
)
from isograd.ops.rotary.api import (
    rotary,
)
from isograd.ops.router.api import (
    load_balancing_loss,
    moe_combine,
    moe_permute,
    moe_router,
    renormalize,
    router_z_loss,
    top_k,
)
from isograd.ops.softmax.api import (
    log_softmax,
    softmax,
)
from isograd.ops.sparsemax.api import (
    sparsemax,
)

__all__ = [
    "add_layernorm",
    "add_rmsnorm",
    "distillation_loss",
    "dropout",
    "geglu",
    "gelu",
    "gelu_mul",
    "gumbel_softmax",
    "kl_div",
    "layernorm",
    "load_balancing_loss",
    "log_softmax",
    "moe_combine",
    "moe_permute",
    "moe_router",
    "renormalize",
    "rmsnorm",
    "rotary",
    "router_z_loss",
    "silu",
    "silu_mul",
    "softmax",
    "sparsemax",
    "swiglu",
    "top_k",
]
