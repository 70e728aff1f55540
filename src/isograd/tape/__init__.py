"""Reverse-mode differentiation for plain arrays.

`rules.py` has the operations on arrays and `gather_rules.py` those of the gather family, `variable.py` the values and
how an operation is applied to them, `recording.py` the tape with checkpoints and the walk backwards, `functions.py` the
operations as functions.
"""

from isograd.tape.functions import (
    add,
    concatenate,
    distillation_loss,
    div,
    embedding,
    exp,
    getitem,
    gumbel_softmax,
    kl_div,
    log,
    log_softmax,
    matmul,
    mean,
    mul,
    neg,
    relu,
    reshape,
    scatter_sum,
    segment_sum,
    silu,
    softmax,
    sparsemax,
    sqrt,
    sub,
    sum,  # noqa: A004 - NumPy's name
    take_along_axis,
    transpose,
)
from isograd.tape.recording import Tape
from isograd.tape.variable import Variable

__all__ = [
    "Tape",
    "Variable",
    "add",
    "concatenate",
    "distillation_loss",
    "div",
    "embedding",
    "exp",
    "getitem",
    "gumbel_softmax",
    "kl_div",
    "log",
    "log_softmax",
    "matmul",
    "mean",
    "mul",
    "neg",
    "relu",
    "reshape",
    "scatter_sum",
    "segment_sum",
    "silu",
    "softmax",
    "sparsemax",
    "sqrt",
    "sub",
    "sum",
    "take_along_axis",
    "transpose",
]
