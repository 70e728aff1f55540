"""Every function of arrays in `isograd`: its errors name it, and its own argument."""

import inspect

import numpy as np
import pytest
from conformance.operations import NAMES, arrays_of, required_of, wrong_of

import isograd as ig
from isograd.ops import OPERATIONS

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4)).astype(np.float32)
P = (np.abs(X) / np.abs(X).sum(1, keepdims=True)).astype(np.float32)
WIDE, INTEGERS, HIGH = X.astype(np.float64), X.astype(np.int32), np.zeros([1] * 9, np.float32)
HIGH_INDEX = HIGH.astype(np.int64)
ROWS, FAR, INDEX = np.array([0, 1, 2]), np.array([0, 1, 9]), np.array([[0, 1], [2, 3], [1, 1]])
DISTINCT = np.array([[0, 1], [2, 3], [1, 0]])
Q = RNG.standard_normal((1, 1, 3, 16)).astype(np.float32)
LSE, ONE = Q[..., 0], np.ones((), np.float32)
VALUES = X[:, :2]

# What works, and for each argument what does not: its name stands in the error behind the function's.
ROW = {"x": (INTEGERS, HIGH, "x", None), "axis": (7, 0.5)}
REDUCED = {"x": (INTEGERS, "x", None), "axis": (7, 0.5, (0, 0))}
BACKWARD = {"dy": (X[:1], WIDE, None), "y": (None,), "axis": (7, 0.5)}
ATTENTION = {
    "q": (INTEGERS, X, None), "k": (X, Q.astype(np.float64)), "v": (X, Q[:, :, :1]),
    "window": ((-1, 2), 3), "alignment": ("left",), "scale": ("one",), "softcap": (-1.0,), "layout": ("LD",),
    "bias": (X[:2], "b"), "mask": (X, Q), "sinks": (X, "s"), "dropout_p": (2.0,), "cu_seqlens": ((ROWS, ROWS), 3),
    "segment_ids": ((ROWS, ROWS), 3), "preference": ("none", 3),
}  # fmt: skip
LENGTHS = np.array([2], np.int32)
WITH_CACHE = {
    key: ATTENTION[key] for key in ("q", "window", "scale", "softcap", "layout", "sinks")
}  # fmt: skip
LOSS = {
    "ignore_index": (0.5,), "label_smoothing": (2.0, "a"), "z_loss": (-1.0, "a"), "reduction": ("avg",),
    "count": ("a", X),
}  # fmt: skip
CROSS = LOSS | {"logits": (INTEGERS, HIGH, None), "targets": (FAR, X[0], WIDE), "weight": (X[0, :2], INTEGERS[0])}
LINEAR = LOSS | {
    "hidden": (INTEGERS, None), "weight": (X[:, :2], WIDE), "targets": (FAR, X[0], ROWS[:1]), "bias": (X, WIDE[0, :3]),
    "class_weight": (X[0, :2],), "chunk": (0, 0.5), "preference": ("none",),
}  # fmt: skip
GRADIENT = {"return_gradient": True}
# Whose inputs are not of one kind each: they are written out below.
DONE = {"top_k", "moe_router", "moe_router_backward", "load_balancing_loss", "router_z_loss", "router_z_loss_backward"}
CALLS = [
    *[(name, (X,), {}, {"x": (INTEGERS, "x", None)}) for name in (
        "exp", "log", "relu", "sigmoid", "sqrt", "tanh")],
    *[(name, (X, X), {}, {"a": ("x", INTEGERS), "b": ("x", X[:, :2], WIDE)}) for name in (
        "equal", "greater", "greater_equal", "less", "less_equal", "not_equal", "maximum", "minimum")],
    ("matmul", (X, X.T.copy()), {}, {"a": ("x", INTEGERS), "b": (X, WIDE.T), "precision": ("int8", 16)}),
    ("power", (X, X), {}, {"x": ("x", INTEGERS), "y": ("x", X[:, :2], WIDE)}),
    ("where", (X > 0, X, X), {}, {"mask": (X, "x", None), "a": (INTEGERS, "x"), "b": (X[:, :2], WIDE)}),
    *[(name, (X,), {}, REDUCED) for name in ("max", "mean", "min", "sum")],
    *[(name, (X,), {}, ROW) for name in ("softmax", "log_softmax")],
    *[(name, (X,), {}, {"out": (X[:1].copy(), WIDE.copy(), 3)}) for name in ("softmax", "log_softmax")],
    *[(name, (X, P), {}, BACKWARD) for name in ("softmax_backward", "log_softmax_backward")],
    *[(name, (X, P), {}, {"out": (X[:1].copy(), WIDE.copy(), 3)}) for name in (
        "softmax_backward", "log_softmax_backward")],
    ("attention", (Q, Q, Q), {}, ATTENTION | {"out": (Q[:, :, :1].copy(), 3)}),
    ("attention", (Q, Q, Q), {"dropout_p": 0.5, "seed": 1}, {"seed": (-1, None)}),
    ("attention_backward", (Q, Q, Q, Q, Q, LSE), {}, ATTENTION | {
        "do": (X, Q[:, :, :1]), "o": (X, Q[:, :, :1]), "lse": (X, LSE.astype(np.float64)), "dlse": (X,)}),
    ("attention_backward", (Q, Q, Q, Q, Q, LSE), {"dropout_p": 0.5, "seed": 1}, {"seed": (-1, None)}),
    ("attention_with_cache", (Q, Q, Q, LENGTHS), {}, WITH_CACHE | {
        "k_cache": (X, Q.astype(np.float64)), "v_cache": (X, Q[:, :, :1]), "out": (Q[:, :, :1].copy(), 3),
        "cache_seqlens": (LENGTHS + 9, X, 3, None), "preference": ("none", 3)}),
    ("attention_with_cache", (Q, Q, Q, LENGTHS), {"block_table": LENGTHS[:, None] * 0}, WITH_CACHE | {
        "block_table": (LENGTHS, LENGTHS[:, None], X, 3)}),
    ("attention_delta", (Q, Q), {}, {"o": (X, Q.astype(np.int32), None), "do": (X, Q[:, :, :1]), "layout": ("LD",)}),
    ("cross_entropy", (X, ROWS), {}, CROSS | {"axis": (7, 0.5)}),
    ("cross_entropy", (X, ROWS), GRADIENT, CROSS | {
        "axis": (7,), "dloss": (X, "a"), "out": (X[:1].copy(), WIDE.copy(), 3)}),
    ("cross_entropy_backward", (1.0, X, ROWS), {}, CROSS | {
        "axis": (7,), "dloss": (X, "a"), "state": (X,), "out": (X[:1].copy(), WIDE.copy(), 3)}),
    ("linear_cross_entropy", (X, X, ROWS), {}, LINEAR),
    ("linear_cross_entropy", (X, X, ROWS), GRADIENT, LINEAR | {"dloss": (X, "a")}),
    ("distillation_loss", (X, X), {}, {
        "student": (INTEGERS, HIGH, None), "teacher": (X[:1], WIDE), "temperature": (0.0, "a"), "reduction": ("avg",)}),
    ("distillation_loss", (X, VALUES), {"indices": DISTINCT}, {
        "teacher": (X[:1], WIDE), "indices": (DISTINCT + 2, X, DISTINCT[:1])}),
    ("distillation_loss_backward", (ONE, X, X), {}, {
        "dloss": (X, "a"), "student": (INTEGERS, HIGH, None), "teacher": (X[:1], WIDE), "temperature": (0.0, "a"),
        "reduction": ("avg",), "out": (X[:1].copy(), WIDE.copy(), 3)}),
    ("distillation_loss_backward", (ONE, X, VALUES), {"indices": DISTINCT}, {
        "indices": (DISTINCT + 2, X, DISTINCT[:1])}),
    ("embedding", (X, ROWS), {}, {
        "weight": (INTEGERS, None), "indices": (FAR, X, HIGH_INDEX), "padding_idx": (7, 0.5)}),
    ("embedding_backward", (X, ROWS, 5), {}, {
        "dy": (INTEGERS, X[:1], None), "indices": (FAR, X), "num_embeddings": (-1, 0.5), "padding_idx": (7, 0.5)}),
    ("segment_sum", (X, ROWS, 5), {}, {
        "values": (INTEGERS, None), "segment_ids": (FAR, X, HIGH_INDEX), "num_segments": (-1, 0.5)}),
    ("scatter_sum", (X, INDEX, VALUES), {}, {
        "x": (INTEGERS, X[0], None), "indices": (INDEX + 2, X, INDEX[:2]), "values": (X[:1], WIDE[:, :2]),
        "axis": (7, 0.5)}),
    ("take_along_axis", (X, INDEX), {}, {
        "x": (INTEGERS, X[0], HIGH, None), "indices": (INDEX + 2, X, INDEX[:2]), "axis": (7, 0.5)}),
    ("take_along_axis_backward", (VALUES, INDEX, (3, 4)), {}, {
        "dv": (INTEGERS, None), "indices": (INDEX + 2, X), "shape": ((3, -1), 4, (2, 4)), "axis": (7, 0.5),
        "unique_indices": (2,)}),
    ("top_k", (X, 2), {}, {"x": (INTEGERS, HIGH, None), "k": (9, 0.5), "axis": (7, 0.5)}),
    ("renormalize", (P,), {}, {"w": (INTEGERS, HIGH, None), "axis": (7, 0.5)}),
    ("renormalize_backward", (X, P), {}, {"dt": (X[:1], WIDE), "w": (INTEGERS, None), "axis": (7, 0.5)}),
    ("moe_router", (X, 2), {}, {
        "logits": (INTEGERS, None), "k": (9, 0.5), "scoring": ("tanh",), "bias": (X, WIDE[0]), "groups": (3, 0.5),
        "scale": (float("nan"), "a"), "renormalize": (2,)}),
    ("moe_router", (X, 2), {"groups": 2}, {"group_k": (3, 0.5)}),
    ("moe_router_backward", (VALUES, X, INDEX), {}, {
        "dweights": (X[:1], WIDE[:, :2]), "logits": (INTEGERS, None), "experts": (INDEX + 2, X), "scoring": ("tanh",),
        "scale": (float("nan"), "a"), "renormalize": (2,)}),
    *[(name, (INDEX, 4), {}, {"experts": (INDEX + 2, X, None), "num_experts": (-1, 0.5)}) for name in (
        "expert_counts", "expert_permutation")],
    ("moe_permute", (X, ROWS, 1), {}, {"x": (INTEGERS, X[0], None), "order": (FAR, X, ROWS[:1]), "k": (-1, 0.5)}),
    ("moe_permute_backward", (X, ROWS, 1), {}, {
        "dy": (INTEGERS, X[0], None), "order": (FAR, X, INDEX), "k": (2, -1, 0.5)}),
    ("moe_combine", (X, X[:, :1], ROWS), {}, {
        "expert_out": (INTEGERS, X[0], None), "weights": (WIDE[:, :1], X[0]), "order": (FAR, X, ROWS[:1])}),
    ("moe_combine_backward", (X, X, X[:, :1], ROWS), {}, {
        "dy": (X[:1], WIDE), "expert_out": (INTEGERS, X[0], None), "weights": (WIDE[:, :1], X[0]),
        "order": (FAR, X, ROWS[:1])}),
    ("load_balancing_loss", (P, INDEX), {}, {
        "probabilities": (INTEGERS, None), "experts": (INDEX + 2, X), "num_experts": (7, 0.5)}),
    ("load_balancing_loss_backward", (ONE, INDEX, (3, 4)), {}, {
        "dloss": (X, None), "experts": (INDEX + 2, X), "shape": ((3, -1), 4), "dtype": ("int8", 3)}),
    ("router_z_loss", (X,), {}, {"logits": (INTEGERS, HIGH, None)}),
    ("router_z_loss_backward", (ONE, X), {}, {"dloss": (X, None), "logits": (INTEGERS, None)}),
    ("swiglu", (X,), {}, {"x": (INTEGERS, X[:, :3], None)}),
    ("geglu", (X,), {}, {"x": (INTEGERS, X[:, :3], None), "approximate": ("erf",)}),
    ("swiglu_backward", (X[:, :2], X), {}, {"dy": (X, WIDE[:, :2]), "x": (INTEGERS, X[:, :2], None)}),
    ("geglu_backward", (X[:, :2], X), {}, {
        "dy": (X, WIDE[:, :2]), "x": (INTEGERS, X[:, :2], None), "approximate": ("erf",)}),
    ("rotary_table", (4, 8), {}, {"length": (-1, 1.5), "dim": (0, 7, "8"), "base": (0.5, float("inf"), None)}),
    *[
        (name, [a for a in arrays_of(op) if a is not None], required_of(op), wrong_of(op))
        for name, op in OPERATIONS.items()
        if name in NAMES and name not in DONE
    ],
]  # fmt: skip
WITHOUT_ARRAYS = {
    "check", "get_num_threads", "kernels", "prefer", "register_kernel", "set_num_threads", "unregister_kernel",
}  # fmt: skip


# Options that are taken as true or false, whatever is given.
FLAGS = {"causal", "keepdims", "bias_gradient"}
# What an error may speak of in place of an argument: its parts, the one that it does not go with, or all alike.
ALSO = {
    "cu_seqlens": "cu_seqlens_q", "segment_ids": "q_segment_ids", "dy": "y has (shape|dtype)|shape",
    "x": "shape|operands?|got", "logits": "shape", "student": "shape", "w": "shape", "a": "operands?",
    "b": "operands?|shapes?", "y": "operands?|shapes?",
}  # fmt: skip
NUMPY_ALONE = {
    "exp", "log", "relu", "sigmoid", "sqrt", "tanh", "equal", "greater", "greater_equal", "less",
    "less_equal", "not_equal", "maximum", "minimum", "matmul", "power", "where", "max", "mean", "min", "sum",
    "rotary_table",
}  # fmt: skip


def test_no_function_is_left_out():
    functions = {name for name in ig.__all__ if inspect.isfunction(getattr(ig, name))}
    assert {name for name, *_ in CALLS} == functions - WITHOUT_ARRAYS
    for name in functions - WITHOUT_ARRAYS:
        tried = {argument for called, _, _, wrong in CALLS for argument in wrong if called == name}
        parameters = set(inspect.signature(getattr(ig, name)).parameters) - FLAGS
        assert {p for p in parameters if not p.startswith("return_")} - tried == set(), name


def plain(array):
    return array


def tensor(array):
    import torch

    return torch.tensor(array) if isinstance(array, np.ndarray) else array


@pytest.mark.parametrize("kind", [plain, tensor])
def test_an_error_names_the_function_that_was_called_and_its_argument(kind):
    if kind is tensor:
        pytest.importorskip("torch", reason="needs torch")
    for name, args, options, wrong in CALLS:
        if kind is tensor and name in NUMPY_ALONE:
            continue
        function = getattr(ig, name)
        good = dict(zip(inspect.signature(function).parameters, map(kind, args), strict=False))
        good |= {key: kind(value) for key, value in options.items()}
        function(**good)
        for argument, values in wrong.items():
            said = rf"{argument}|{ALSO[argument]}" if argument in ALSO else argument
            for value in values:
                with pytest.raises(ig.IsogradError, match=rf"^{name}: (.*\W)?({said})\b"):
                    function(**good | {argument: kind(value)})
