"""Reverse-mode differentiation for plain arrays.

`rules.py` has the operations on arrays, `choice_rules.py` maxima and masks, `index_rules.py` indexing and the other
`*_rules.py` the families; `operations.py` records what `isograd.ops` declares. `variable.py` has the values and how an
operation is applied to them, `recording.py` the tape with checkpoints and the walk backwards, `functions.py` the
operations as functions.
"""

from isograd.tape import exported
from isograd.tape import operations as operations
from isograd.tape.exported import *  # noqa: F403
from isograd.tape.functions import (
    add,
    attention,
    concatenate,
    cross_entropy,
    div,
    embedding,
    exp,
    getitem,
    linear_cross_entropy,
    log,
    matmul,
    max,  # noqa: A004 - NumPy's name
    maximum,
    mean,
    min,  # noqa: A004 - NumPy's name
    minimum,
    mul,
    neg,
    power,
    relu,
    reshape,
    scatter_sum,
    segment_sum,
    sigmoid,
    sqrt,
    sub,
    sum,  # noqa: A004 - NumPy's name
    take_along_axis,
    tanh,
    transpose,
    where,
)
from isograd.tape.recording import Tape
from isograd.tape.variable import Variable

__all__ = [
    "Tape",
    "Variable",
    "add",
    "attention",
    "concatenate",
    "cross_entropy",
    "div",
    "embedding",
    "exp",
    "getitem",
    "linear_cross_entropy",
    "log",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "neg",
    "power",
    "relu",
    "reshape",
    "scatter_sum",
    "segment_sum",
    "sigmoid",
    "sqrt",
    "sub",
    "sum",
    "take_along_axis",
    "tanh",
    "transpose",
    "where",
]
__all__ += exported.__all__
