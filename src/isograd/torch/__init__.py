"""isograd for PyTorch: torch's spelling, autograd, `torch.library` operators, modules, and a switch for whole models.

    import isograd.torch as igt

    y = igt.softmax(x, dim=-1)                # also double backward, torch.func, torch.compile, autocast
    v = igt.gather(y, -1, index)              # gradients add repeated indices order-free
    loss = igt.cross_entropy(logits, targets)
    o = igt.scaled_dot_product_attention(q, k, v, is_causal=True)
    igt.clip_grad_norm_(model.parameters(), 1.0)
    igt.optim.AdamW(model.parameters(), lr=3e-4).step()
    with igt.use() as switch:                 # torch's own functions run on isograd's kernels in the block
        loss = model(batch)
    print(switch.report())                    # what was replaced and what was not, and why
    handle = igt.convert(model)               # modules that are known, in place; handle.restore() undoes it
    total = igt.distributed.GradientSum(model)  # p.grad without a trace of the number of ranks

Softmaxes; attention; gather, scatter_add, index_add, embedding and their relatives; topk and mixture-of-experts
routing; cross entropy, divergences, gumbel_softmax and sparsemax. First derivatives have the library's bits, and so
have all those of linear operations; other second derivatives are written with torch's own sums, so their bits are
torch's business and may differ between machines.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch.library as _torch_library  # noqa: F401
except ImportError as error:
    raise ImportError("isograd.torch needs PyTorch, which is not installed: pip install 'isograd[torch]'") from error

from isograd.torch import exported
from isograd.torch.clipping import clip_grad_norm_, get_total_norm
from isograd.torch.decoding import attention_with_cache
from isograd.torch.dot_product import attention, scaled_dot_product_attention
from isograd.torch.exported import *  # noqa: F403
from isograd.torch.grouped import grouped_linear
from isograd.torch.huggingface import register_transformers
from isograd.torch.indexing import embedding, gather, index_add, index_select, scatter_add, take_along_dim
from isograd.torch.losses import (
    cross_entropy,
    linear_cross_entropy,
)
from isograd.torch.modules import CrossEntropyLoss, KLDivLoss, LogSoftmax, Softmax
from isograd.torch.products import linear, matmul

if TYPE_CHECKING:
    from isograd.torch import distributed
    from isograd.torch import optim as optim
    from isograd.torch.audit_report import Audit
    from isograd.torch.auditing import audit
    from isograd.torch.converting import Conversion, ConversionReport, convert
    from isograd.torch.switch import Report, Switch, use
    from isograd.torch.tracing import Trace, trace

__all__ = [
    "Audit",
    "Conversion",
    "ConversionReport",
    "CrossEntropyLoss",
    "KLDivLoss",
    "LogSoftmax",
    "Report",
    "Softmax",
    "Switch",
    "Trace",
    "attention",
    "attention_with_cache",
    "audit",
    "clip_grad_norm_",
    "convert",
    "cross_entropy",
    "distributed",
    "embedding",
    "gather",
    "get_total_norm",
    "grouped_linear",
    "index_add",
    "index_select",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "optim",
    "register_transformers",
    "scaled_dot_product_attention",
    "scatter_add",
    "take_along_dim",
    "trace",
    "use",
]
__all__ += exported.__all__


# Names whose modules load what few programs need, torch._dynamo for one: they are imported when they are asked for.
_LATE = {
    "Audit": "audit_report",
    "Conversion": "converting",
    "ConversionReport": "converting",
    "Report": "switch",
    "Switch": "switch",
    "Trace": "tracing",
    "audit": "auditing",
    "convert": "converting",
    "distributed": "distributed",
    "optim": "optim",
    "trace": "tracing",
    "use": "switch",
}


def __getattr__(name: str) -> Any:
    """What is imported late: a module, or a name of one."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"isograd.torch.{_LATE[name]}")
    found = {late: getattr(module, late, module) for late, place in _LATE.items() if place == _LATE[name]}
    globals().update(found)
    return found[name]
