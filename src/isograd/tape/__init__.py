"""Reverse-mode differentiation for plain arrays.

`rules.py` has the operations on arrays, `variable.py` the values and how an operation is applied to them,
`recording.py` the tape with checkpoints and the walk backwards, `functions.py` the operations as functions.
"""

from isograd.tape.functions import (
    add,
    concatenate,
    div,
    exp,
    getitem,
    load_balancing_loss,
    log,
    log_softmax,
    matmul,
    mean,
    moe_combine,
    moe_permute,
    moe_router,
    mul,
    neg,
    relu,
    renormalize,
    reshape,
    router_z_loss,
    silu,
    softmax,
    sqrt,
    sub,
    sum,  # noqa: A004 - NumPy's name
    top_k,
    transpose,
)
from isograd.tape.recording import Tape
from isograd.tape.variable import Variable

__all__ = [
    "Tape",
    "Variable",
    "add",
    "concatenate",
    "div",
    "exp",
    "getitem",
    "load_balancing_loss",
    "log",
    "log_softmax",
    "matmul",
    "mean",
    "moe_combine",
    "moe_permute",
    "moe_router",
    "mul",
    "neg",
    "relu",
    "renormalize",
    "reshape",
    "router_z_loss",
    "silu",
    "softmax",
    "sqrt",
    "sub",
    "sum",
    "top_k",
    "transpose",
]
