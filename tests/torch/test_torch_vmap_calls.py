"""Under vmap every operator is called as often for many members as for few; each has the bits of a call alone."""

import functools

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import isograd.torch  # noqa: F401
from isograd.ops import OPERATIONS

TOKENS, EXPERTS, K, WIDTH = 6, 8, 2, 5


@functools.cache
def arguments(seed, device="cpu"):
    """Arguments of one member for every operator of the library, more than one choice where rules differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def below(bound, *shape):
        return torch.randint(bound, shape, generator=generator)

    preference = "order_free" if device == "cpu" else None  # the one choice that a GPU has
    x, y, rows = normal(TOKENS, EXPERTS), normal(TOKENS, EXPERTS).softmax(-1), normal(TOKENS * K, WIDTH)
    one, tokens = normal(1)[0], normal(TOKENS)
    index, classes = below(TOKENS, 4, EXPERTS), below(EXPERTS, TOKENS)
    classes[seed % TOKENS] = -100
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(TOKENS)])
    order = torch.randperm(TOKENS * K, generator=generator)
    shares, count, bias = normal(TOKENS, K).softmax(-1), normal(1)[0].abs() + 1, normal(EXPERTS)
    few, weight = below(TOKENS, 4), bias.abs()
    top = (x.log_softmax(-1).gather(1, experts), experts)
    ce = (classes, None, 1, -100, 0.1, 0.01)
    state = torch.ops.isograd.cross_entropy(x, *ce)[1]
    hidden, matrix = normal(TOKENS, WIDTH), normal(EXPERTS, WIDTH)
    linear = (hidden, matrix, classes, bias, None, -100, 0.1, 0.01)
    q, k, v = (normal(2, 4, 5, 16) for _ in range(3))
    extra, sinks = (normal(2, 4, 5, 5), normal(4))
    o, lse = torch.ops.isograd.attention(q, k, v, extra)
    return {
        "softmax": (x, 0),
        "log_softmax": (x, 1),
        "softmax_backward": (x, y, 0),
        "log_softmax_backward": (x, y.log(), 1),
        "sparsemax": (x, 0),
        "sparsemax_backward": (x, y, 1),
        "gumbel_softmax": (x, 0, 0.5, False, 3, 4),
        "gumbel_softmax_backward": (x, y, 0, 0.5),
        "gather": (x, 0, index),
        "gather_backward": (normal(4, EXPERTS), 0, index, [TOKENS, EXPERTS]),
        "scatter_add": (x, 0, index, normal(4, EXPERTS)),
        "index_select": (x, 0, few),
        "index_select of columns": (x, 1, few),
        "index_select_backward": (normal(TOKENS, 4), 1, few, [TOKENS, EXPERTS]),
        "index_add": (x, 1, few, normal(TOKENS, 4)),
        "embedding": (x, few, 2),
        "embedding_backward": (normal(4, WIDTH), few, TOKENS, 2),
        "embedding_backward without padding": (normal(4, WIDTH), few, TOKENS),
        "top_k": (x, 3, 0),
        "moe_router": (x, None, K, "softmax", True),
        "moe_router with a bias": (x, bias, K, "sigmoid", True, 2, 1, 0.5),
        "moe_router_backward": (shares, x, experts, "sigmoid", True, 0.5),
        "expert_counts": (experts, EXPERTS),
        "expert_permutation": (experts, EXPERTS),
        "moe_permute": (normal(TOKENS, WIDTH), order, K),
        "moe_permute_backward": (rows, order, K),
        "moe_combine": (rows, shares, order),
        "moe_combine_backward": (normal(TOKENS, WIDTH), rows, shares, order),
        "load_balancing_loss": (y, experts),
        "load_balancing_loss_backward": (one, experts, [TOKENS, EXPERTS], torch.float32),
        "router_z_loss": (x,),
        "router_z_loss_backward": (one, x),
        "scaled": (x, one),
        "divided": (x, y),
        "kl_div": (y.log(), y.flip(0), "batchmean", False),
        "kl_div in bfloat16": (y.log().bfloat16(), y.flip(0).bfloat16(), "mean", False, True),
        "kl_div_backward": (one, y.log(), y.flip(0), "mean", False, "target"),
        "distillation_loss": (x, y, None, 2.0),
        "distillation_loss of the best": (x, *top, 1.0, "mean"),
        "distillation_loss_backward": (one, x, y, None, 2.0, "batchmean"),
        "distillation_loss_backward of the best": (one, x, *top, 1.0, "sum"),
        "cross_entropy": (x, *ce),
        "cross_entropy of probabilities": (x, y),
        "cross_entropy with a count": (x, *ce, "mean", None, False, count),
        "cross_entropy with weights": (x, classes, weight),
        "cross_entropy_backward": (one, x, *ce[:2], state, *ce[2:], "mean", None),
        "cross_entropy_backward with a count": (one, x, *ce[:2], state, *ce[2:], "mean", None, count),
        "linear_cross_entropy": linear,
        "linear_cross_entropy with a count": (*linear, "mean", None, None, None, False, count),
        "linear_cross_entropy with gradients": (*linear, "mean", None, None, None, True),
        "linear_cross_entropy with that of hidden": (*linear, "mean", None, None, None, True, None, False),
        "linear_cross_entropy with that of a sum": (*linear, "sum", None, 3, None, True, None, False),
        "linear_cross_entropy_backward": (one, *linear, "mean", None, None, None),
        "linear_cross_entropy_backward of hidden": (one, *linear, "mean", None, None, None, count, False),
        "linear_cross_entropy_backward of rows": (tokens, *linear, "none", None, None, preference, None, False),
        "matmul": (normal(2, 4, 5), normal(5, 3), "int16"),
        "matmul by a weight": (normal(4, 5), normal(5, 3), "int16", "other"),
        "matmul over tokens": (normal(4, 5), normal(5, 3), "int16", "tokens"),
        "add_to_rows": (normal(4, 5), normal(5)),
        "sum_of_rows": (normal(4, 5),),
        "grouped_matmul": (normal(4, 5), normal(2, 5, 3), torch.tensor([0, 1, 4])),
        "grouped_outer": (normal(4, 5), normal(4, 3), torch.tensor([0, 1, 4])),
        "attention": (q, k, v, extra),
        "attention with sinks": (q, k, v, None, None, None, None, None, None, sinks),
        "attention_with_cache": (q, k, v, torch.tensor([5, 3], dtype=torch.int32)),
        "attention_backward": (normal(2, 4, 5, 16), None, o, lse, False, False, q, k, v, extra),
        "attention_backward with a bias": (normal(2, 4, 5, 16), None, o, lse, True, False, q, k, v, extra),
    }


class Calls(TorchDispatchMode):
    """Counts what is called below vmap."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def mapped(name, size, places, device="cpu"):
    """(results under vmap, calls below it, those of every member alone)."""
    op = getattr(torch.ops.isograd, name.split()[0]).default
    members = [
        [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments(seed, device)[name]]
        for seed in range(size)
    ]
    alone = [[m[i] if i in places else members[0][i] for i in range(len(m))] for m in members]
    batch = [torch.stack([m[i] for m in alone], -1) if i in places else a for i, a in enumerate(alone[0])]
    with Calls() as calls:
        found = torch.vmap(op, tuple(-1 if i in places else None for i in range(len(batch))))(*batch)
    expected = [op(*m) for m in alone]
    if isinstance(found, torch.Tensor):
        found, expected = (found,), [(e,) for e in expected]
    return found, calls.count, [torch.stack(parts) for parts in zip(*expected, strict=True)]


# The arguments that make every member a problem of its own, where one kernel does not serve them all: class weights are
# those of all rows, and linear_cross_entropy has one matrix, which it returns the gradient of with any argument.
ONE_BY_ONE = {
    "attention_with_cache": {0, 1, 2, 3},
    "matmul by a weight": {1},
    "matmul over tokens": {0, 1},
    "add_to_rows": {1},
    "grouped_matmul": {0, 1, 2},
    "grouped_outer": {0, 1, 2},
    "cross_entropy with weights": {2},
    "linear_cross_entropy": {1, 3},
    "linear_cross_entropy with a count": {1, 3},
    "linear_cross_entropy with gradients": {0, 1, 2, 3},
    "linear_cross_entropy with that of hidden": {1, 3},
    "linear_cross_entropy with that of a sum": {1, 3},
    "linear_cross_entropy_backward": {0, 1, 2, 3, 4},
    "linear_cross_entropy_backward of hidden": {2, 4},
    "linear_cross_entropy_backward of rows": {2, 4},
}


def cases():
    """All tensors mapped that may be mapped together; more thoroughly, all of them and each alone."""
    for name, given in arguments(0).items():
        tensors = tuple([i for i, a in enumerate(given) if isinstance(a, torch.Tensor)])
        together = tuple([i for i in tensors if i not in ONE_BY_ONE.get(name, ())])
        for places in sorted({tensors, together, *[(i,) for i in tensors]} - {()}):
            yield pytest.param(name, places, marks=[] if places == together else pytest.mark.thorough)


def test_every_operator_is_among_them():
    names = {n.removeprefix("isograd::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("isograd::")}
    # Those of isograd.ops follow from their declarations, which the conformance tests vmap.
    assert {name.split()[0] for name in arguments(0)} | set(OPERATIONS) == names


@pytest.mark.parametrize(("name", "places"), list(cases()))
def test_calls_do_not_grow_with_the_batch(name, places):
    found, many, expected = mapped(name, 5, places)
    assert all(map(torch.equal, found, expected))
    grows = many != mapped(name, 3, places)[1]
    assert grows == bool(ONE_BY_ONE.get(name, set()) & set(places))
