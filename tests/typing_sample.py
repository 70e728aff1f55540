"""What mypy sees of the public functions; `test_types.py` checks this file, nothing runs it."""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import isograd as ig
import isograd.torch as igt

x: NDArray[np.float32] = np.zeros((4, 8), np.float32)
t = np.arange(4)
tensor = torch.zeros(4, 8)
target = torch.arange(4)
variable = ig.Tape().leaf(x)

assert_type(ig.softmax(x), NDArray[np.float32])
assert_type(ig.softmax(tensor), torch.Tensor)
assert_type(ig.softmax(torch.nn.Parameter(tensor)), torch.Tensor)
assert_type(ig.softmax(variable), ig.Variable)
assert_type(ig.softmax_backward(x, x, axis=0, out=x), NDArray[np.float32])
assert_type(ig.take_along_axis(variable, t), ig.Variable)
assert_type(ig.scatter_sum(x, t, variable), ig.Variable)
assert_type(ig.embedding(x, t), NDArray[np.float32])
assert_type(ig.top_k(x, 2).values, NDArray[np.float32])
assert_type(ig.top_k(variable, 2).indices, NDArray[np.int64])
assert_type(ig.moe_router(tensor, 2, scoring="sigmoid").experts, torch.Tensor)
assert_type(ig.cross_entropy(x, t), NDArray[Any])
assert_type(ig.cross_entropy(variable, t, reduction="sum"), ig.Variable)
assert_type(ig.cross_entropy(tensor, target, return_gradient=True), tuple[torch.Tensor, torch.Tensor])
assert_type(ig.linear_cross_entropy(x, x, t), NDArray[Any])
assert_type(ig.linear_cross_entropy(variable, x, t), ig.Variable)
assert_type(ig.attention(x, x, x, causal=True), NDArray[Any])
assert_type(ig.attention(variable, x, x, return_lse=True), tuple[ig.Variable, ig.Variable])
assert_type(ig.attention_with_cache(x, x, x, t, window=(9, None)), NDArray[Any])
assert_type(ig.attention_with_cache(tensor, tensor, tensor, t, return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(ig.attention_backward(x, x, x, x, x, x).dq, NDArray[Any])
assert_type(x @ variable, ig.Variable)
assert_type(variable @ x, ig.Variable)
assert_type(2 * variable, ig.Variable)
assert_type(x - variable, ig.Variable)
assert_type(x**variable, ig.Variable)
assert_type(variable**2, ig.Variable)
assert_type(variable == 2, NDArray[np.bool_])
assert_type(variable[variable > 0], ig.Variable)
assert_type(ig.tanh(x), NDArray[np.float32])
assert_type(ig.gelu(variable, approximate="tanh"), ig.Variable)
assert_type(ig.max(variable, axis=0), ig.Variable)
assert_type(ig.maximum(x, variable), ig.Variable)
assert_type(ig.maximum(x, 0.0), NDArray[Any])
assert_type(ig.where(x > 0, 1.0, variable), ig.Variable)
assert_type(ig.less(x, 0.0), NDArray[np.bool_])
assert_type(ig.Tape().backward(variable)[variable], NDArray[Any])
assert_type(igt.cross_entropy(tensor, target, reduction="none"), torch.Tensor)
assert_type(igt.attention(tensor, tensor, tensor, return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(igt.attention_with_cache(tensor, tensor, tensor, target), torch.Tensor)

ig.softmax([1.0, 2.0])  # wrong
ig.cross_entropy(x, t, reduction="avg")  # wrong
ig.kl_div(x, x, reduction="avg")  # wrong
ig.gelu(x, approximate="erf")  # wrong
ig.relu([1.0])  # wrong
ig.moe_router(x, 2, scoring="tanh")  # wrong
ig.attention(x, x, x, layout="LBHD")  # wrong
ig.attention(x, x, x, casual=True)  # wrong
ig.attention_with_cache(x, x, x, t, causal=True)  # wrong
igt.cross_entropy(tensor, target, reduction="avg")  # wrong
igt.attention(tensor, tensor, tensor, alignment="left")  # wrong
