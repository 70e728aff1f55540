"""Every function of isograd.torch: its errors name it and its arguments, and a default device changes nothing."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch import exported

GENERATOR = torch.Generator().manual_seed(0)
X, P = torch.randn(3, 4, generator=GENERATOR), torch.rand(3, 1, generator=GENERATOR)
Q = torch.randn(1, 1, 3, 16, generator=GENERATOR)
INTEGERS, HIGH, META = X.to(torch.int32), torch.zeros([1] * 9), torch.empty(3, 4, device="meta")
ONE = torch.tensor([1], dtype=torch.int32)
ROWS, INDEX = torch.tensor([0, 1, 2]), torch.tensor([[0, 1], [2, 3], [1, 1]])
FAR, ROW = torch.tensor([0, 1, 9]), torch.tensor([0])
HIGH_INDEX = HIGH.long()

# A name, calls that work, and calls that do not with what their error says behind the name.
FUNCTIONS = [
    ("softmax", [(X, 1)], [((INTEGERS, 1), "input has dtype"), ((X, 7), "dim is 7"), ((HIGH, 0), "")]),
    ("log_softmax", [(X, 1)], [((INTEGERS, 1), "input has dtype"), ((X, 7), "dim is 7"), ((HIGH, 0), "")]),
    ("softmax_backward", [(X, X, 1)], [((X, X[:1], 1), "dy has shape"), ((X, X.double(), 0), "dy has dtype")]),
    ("log_softmax_backward", [(X, X, 1)], [((X, X[:1], 1), "dy has shape"), ((X, META, 1), "dy is on cpu")]),
    (
        "gather",
        [(X, 1, INDEX)],
        [
            ((X, 1, INDEX + 2), r"index\[1, 0\] is 4; dim 1 of size 4 accepts -4 to 3"),
            ((INTEGERS, 1, INDEX), "input has dtype"),
            ((X, 5, INDEX), "dim is 5"),
            ((X, 1, X), "index has dtype"),
            ((HIGH, 0, HIGH_INDEX), r"input \(1, .*has rank 9"),
            ((X, 1, META.long()), "input is on cpu, index is on meta"),
            ((3, 1, INDEX), "input is int"),
        ],
    ),
    (
        "take_along_dim",
        [(X, INDEX, 1), (X, INDEX), (X[:1], INDEX, 1)],
        [
            ((X, INDEX + 2, 1), r"indices\[1, 0\] is 4; dim 1 of size 4"),
            ((X, INDEX + 99), r"indices\[0\] is 99"),
            ((X, ROW, 1), "indices has shape"),
            ((X, META.long(), 1), "input is on cpu, indices is on meta"),
            ((HIGH, HIGH_INDEX, 0), "input .*has rank 9"),
        ],
    ),
    (
        "scatter_add",
        [(X, 1, INDEX, X)],
        [
            ((X, 1, INDEX + 2, X), r"index\[1, 0\] is 4; dim 1 of size 4"),
            ((X, 1, INDEX, X.double()), "src has dtype"),
            ((HIGH, 0, HIGH_INDEX, HIGH), "input .*has rank 9"),
        ],
    ),
    (
        "index_add",
        [(X, 0, ROWS, X)],
        [
            ((X, 0, FAR, X), r"index\[2\] is 9; dim 0 of size 3 accepts 0 to 2"),
            ((X, 1, ROW + 9, X[:, :1]), r"index\[0\] is 9; dim 1 of size 4"),
            ((X, 0, ROWS, X[:1]), "source has shape"),
            ((HIGH, 0, ROW, HIGH), "input .*has rank 9"),
        ],
    ),
    (
        "index_select",
        [(X, 1, ROWS)],
        [
            ((X, 1, FAR), r"index\[2\] is 9; dim 1 of size 4 accepts 0 to 3"),
            ((X, 0, INDEX), "index has shape"),
            ((HIGH, 0, ROW), "input .*has rank 9"),
        ],
    ),
    (
        "embedding",
        [(ROWS, X), (ROWS, X, 1)],
        [
            ((FAR, X), r"input\[2\] is 9; .* accepts 0 to 2"),
            ((ROWS, Q), "weight has shape"),
            ((HIGH_INDEX, X), "input .*has rank 9"),
            ((META.long(), X), "weight is on cpu, input is on meta"),
            ((X, X), "input has dtype"),
        ],
    ),
    ("topk", [(X, 2)], [((X, 9), "k is 9"), ((X, 1, 7), "dim is 7"), ((HIGH, 1), "shape .*has rank 9")]),
    (
        "cross_entropy",
        [(X, ROWS), (X, ROWS, X[0].abs())],
        [((X, FAR), "target"), ((X, ROW), "target"), ((X, X.double()), "target"), ((X, META[:, 0].long()), "")],
    ),
    (
        "matmul",
        [(X, X.T), (X[0], X.T), (X, X[0]), (X[0], X[0]), (Q, Q.mT)],
        [
            ((X, X), "input has shape"),
            ((X, X.T.double()), "other has dtype"),
            ((INTEGERS, X), "input has dtype"),
            ((X, META.T), "input is on cpu"),
            ((X, X.sum()), "other is a scalar"),
        ],
    ),
    (
        "linear",
        [(X, X), (X[0], X, ROWS.float()), (Q, Q[0, 0], Q[0, 0, :, 0])],
        [((X, X.T), "input has shape"), ((X, X.double()), "weight has dtype"), ((X, X, X[0]), "bias has shape")],
    ),
    (
        "grouped_linear",
        [(X, torch.stack([X, X]), [0, 1, 3])],
        [
            ((X, X, [0, 3]), "input, weight have shapes"),
            ((X, X[None], [1, 3]), "offsets go from 1 to 3"),
            ((X, X[None].double(), [0, 3]), "weight has dtype"),
            ((INTEGERS, INTEGERS[None], [0, 3]), "input has dtype"),
            ((X, META[None], [0, 3]), "input is on cpu, weight is on meta"),
        ],
    ),
    (
        "linear_cross_entropy",
        [(X, X, ROWS)],
        [((X, X, FAR), "targets"), ((X, X[:, :2], ROWS), "weight"), ((X, X, ROW), "targets")],
    ),
    ("kl_div", [(X, X.exp())], [((X, X[:1]), "target has shape"), ((X, X.double()), "target has dtype")]),
    ("distillation_loss", [(X, X)], [((X, X[:1]), ""), ((X, X, -1.0), "temperature is")]),
    (
        "rotary",
        [(X, P[:, :1], P[:, :1]), (X, P[:, :1], P[:, :1], ROWS)],
        [
            ((X, P[:2], P[:2]), "cos has shape"),
            ((X, P, P, INDEX[0]), "positions has shape"),
            ((X, P, P, FAR), r"positions\[2\] is 9"),
            ((INTEGERS, P, P), "input has dtype"),
        ],
    ),
    ("silu", [(X,)], [((INTEGERS,), "input has dtype"), ((None,), "input")]),
    ("gelu", [(X,), (X, "tanh")], [((X, "erf"), "approximate is 'erf'"), ((INTEGERS,), "input has dtype")]),
    ("silu_mul", [(X, X)], [((X, X[:1]), "gate has shape"), ((X, X.double()), ""), ((INTEGERS, X), "gate has dtype")]),
    ("gelu_mul", [(X, X, "tanh")], [((X, X, "erf"), "approximate is 'erf'"), ((X, X[:1]), "gate has shape")]),
    ("swiglu", [(X,)], [((X[:, :3],), "input has shape"), ((None,), "input")]),
    ("geglu", [(X, "tanh")], [((X[:, :3],), "input has shape"), ((None,), "input")]),
    ("sparsemax", [(X,)], [((X, 7), "dim is 7"), ((HIGH,), ""), ((INTEGERS,), "input has dtype")]),
    ("moe_router", [(X, 2)], [((X, 9), "k is 9"), ((INTEGERS, 1), "logits has dtype"), ((HIGH, 1), "")]),
    ("expert_counts", [(INDEX, 4)], [((INDEX, 2), "experts"), ((X, 2), "experts"), ((ROW, -1), "num_experts is -1")]),
    ("expert_permutation", [(INDEX, 4)], [((INDEX, 2), "experts"), ((ROW, -1), "num_experts is -1")]),
    ("moe_permute", [(X, ROWS, 1)], [((X, FAR, 1), "order"), ((X, ROW, 1), ""), ((X[0], ROW, 1), "x has")]),
    ("moe_combine", [(X, P, ROWS)], [((X, P, FAR), "order"), ((X, P.double(), ROWS), "weights")]),
    (
        "load_balancing_loss",
        [(X, ROWS[:, None])],
        [((X, FAR[:, None]), "experts"), ((X, ROWS[:, None], 7), "num_experts is 7")],
    ),
    ("router_z_loss", [(X,)], [((INTEGERS,), "logits has dtype"), ((HIGH,), "")]),
    ("attention", [(Q, Q, Q)], [((Q, Q, Q[..., :1, :]), "v has shape"), ((X, Q, Q), "q has shape")]),
    (
        "attention_with_cache",
        [(Q, Q, Q, ONE)],
        [
            ((Q, Q, Q[..., :1, :], ONE), "v_cache has shape"),
            ((Q, Q.double(), Q, ONE), "k_cache has dtype"),
            ((Q, Q, Q, ONE.long()), "cache_seqlens has dtype"),
            ((Q, Q, Q, ONE + 9), "cache_seqlens has 10 at 0"),
            ((X, Q, Q, ONE), "q has shape"),
            ((Q.clone().requires_grad_(), Q, Q, ONE), "q requires a gradient"),
        ],
    ),
    (
        "scaled_dot_product_attention",
        [(Q, Q, Q)],
        [((Q, Q.double(), Q), "key has dtype"), ((X[0], Q, Q), "query has shape"), ((Q.int(), Q, Q), "query has")],
    ),
]
KEYWORDS = {
    "gumbel_softmax": ([((X,), {"seed": 1})], [((X, -1.0), {"seed": 0}, "tau is"), ((X,), {"seed": -1}, "seed is")]),
    "dropout": (
        [((X, 0.1), {"seed": 1}), ((X, 0.1, False), {"seed": 1})],
        [((X, 1.5), {"seed": 1}, "p is 1.5"), ((X,), {"seed": -1}, "seed is"), ((INTEGERS,), {"seed": 1}, "input has")],
    ),
    "matmul": ([((X, X.T), {"precision": "int16"})], [((X, X.T), {"precision": "int8"}, "precision is 'int8'")]),
    "attention": (
        [((Q, Q, Q), {"dropout_p": 0.5, "seed": 3}), ((Q, Q, Q), {"dropout_p": 0.5})],
        [((Q, Q, Q), {"dropout_p": 2.0}, "dropout_p is"), ((Q, Q, Q), {"window": (-1, 2)}, "window")],
    ),
    "attention_with_cache": (
        [((Q, Q, Q, ONE), {"block_table": ONE[:, None] - 1, "window": (1, None)})],
        [
            ((Q, Q, Q, ONE), {"block_table": ONE[:, None]}, "block_table has 1 at"),
            ((Q, Q, Q, ONE), {"block_table": ONE}, "block_table has shape"),
            ((Q, Q, Q, ONE), {"precision": "int8"}, "precision is 'int8'"),
            ((Q, Q, Q, ONE), {"precision": "int16"}, "precision is 'int16' for torch.float32"),
            ((Q, Q, Q, ONE), {"window": (-1, 2)}, "window"),
        ],
    ),
    "scaled_dot_product_attention": (
        [((Q, Q, Q), {"dropout_p": 0.5, "is_causal": True})],
        [((Q, Q, Q), {"dropout_p": 2.0}, "dropout_p is")],
    ),
}
CLASSES = {"CrossEntropyLoss", "KLDivLoss", "LogSoftmax", "Report", "Softmax", "Switch"}


def good():
    yield from ((name, args, {}) for name, calls, _ in FUNCTIONS for args in calls)
    yield from ((name, args, kwargs) for name, (calls, _) in KEYWORDS.items() for args, kwargs in calls)


def bad():
    yield from ((name, args, {}, said) for name, _, calls in FUNCTIONS for args, said in calls)
    yield from ((name, *call) for name, (_, calls) in KEYWORDS.items() for call in calls)


def test_no_function_is_left_out():
    # Functions of `isograd.ops` are tried in tests of their own.
    tried = {name for name, *_ in (*good(), *bad())} | set(exported.__all__)
    others = {"register_transformers", "optim", "clip_grad_norm_", "get_total_norm"}  # errors of these: their own tests
    assert tried == set(igt.__all__) - CLASSES - set(igt._LATE) - others


def test_an_error_names_the_function_that_was_called_and_its_arguments():
    for name, args, kwargs, said in bad():
        with pytest.raises(ig.IsogradError, match=f"^{name}: {said}"):
            getattr(igt, name)(*args, **kwargs)


def computed(name, args, kwargs):
    """Results, and gradients of what has them."""
    torch.manual_seed(0)
    leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    # Targets and weights of classes have no gradient.
    counts = {"moe_combine": 2, "attention_with_cache": 0}
    leaves = [a if i < counts.get(name, 1) else args[i] for i, a in enumerate(leaves)]
    found = getattr(igt, name)(*leaves, **kwargs)
    results = [r for r in (found if isinstance(found, tuple) else (found,)) if isinstance(r, torch.Tensor)]
    asked = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    differentiable = [r for r in results if r.requires_grad]
    gradients = torch.autograd.grad([r.square().sum() for r in differentiable], asked) if differentiable else ()
    return [*results, *gradients]


def test_a_default_device_changes_nothing():
    for name, args, kwargs in good():
        expected = computed(name, args, kwargs)
        with torch.device("meta"):
            found = computed(name, args, kwargs)
        torch.set_default_device("meta")
        try:
            also = computed(name, args, kwargs)
        finally:
            torch.set_default_device(None)
        for a, b, c in zip(expected, found, also, strict=True):
            assert b.device.type == c.device.type == "cpu", name
            assert torch.equal(a, b), name
            assert torch.equal(a, c), name


def test_functions_of_arrays_name_themselves():
    x, ids, high = X.numpy(), FAR.numpy(), HIGH_INDEX.numpy()
    for name, args, said in (
        ("embedding", (x, ids), r"indices\[2\] is 9"),
        ("embedding", (x, high), "indices .*has rank 9"),
        ("embedding_backward", (x, ids, 3), r"indices\[2\] is 9"),
        ("embedding_backward", (HIGH.numpy(), high, 3), "indices .*has rank 9"),
        ("segment_sum", (x, ids, 3), r"segment_ids\[2\] is 9"),
        ("segment_sum", (HIGH.numpy(), high, 3), "segment_ids .*has rank 9"),
        ("scatter_sum", (x, ids[2:], x[:, :1], 1), r"indices\[0\] is 9; axis 1 of size 4"),
        ("take_along_axis", (x, ids[None, 2:], 1), r"indices\[0, 0\] is 9; axis 1"),
        ("top_k", (x, 9), "k is 9"),
    ):
        with pytest.raises(ig.IsogradError, match=f"^{name}: {said}"):
            getattr(ig, name)(*args)
