"""topk, the router, permutation, combination and auxiliary losses as torch operators."""

import opinfo_samples as samples
import pytest
from opinfo_samples import numpy, same_bits

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch import bind

OPERATOR = {name: bound.call for name, bound in bind._bound.items()}
OPTIONS = [
    {},
    {"renormalize": True, "scale": 2.5},
    {"scoring": "sigmoid"},
    {"scoring": "sigmoid", "renormalize": True, "groups": 2, "group_k": 1, "scale": 0.5},
]


def logits_of(dtype, seed=0, tokens=6):
    return (torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def layout(t):
    return t.shape, t.stride(), t.dtype


# --- topk -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_topk_of_torchs_samples(dtype):
    # torch leaves the order of equal elements open: values decide.
    for sample in samples.sample_inputs("topk", dtype):
        if sample.args[2:3] == (False,):
            with pytest.raises(ig.UnsupportedError, match="largest is False"):
                samples.apply(igt.topk, sample)
            continue
        for variant in (sample, samples.spread(sample)):
            got, expected = samples.apply(igt.topk, variant), samples.apply(torch.topk, sample)
            assert torch.equal(got.values, expected.values)
            assert got.indices.dtype is torch.int64
            dim = sample.args[1] if len(sample.args) > 1 else -1
            assert torch.equal(torch.gather(variant.input, dim, got.indices), got.values)
            dy = torch.randn(got.values.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            (ours,) = torch.autograd.grad(got.values, variant.input, dy)
            (theirs,) = torch.autograd.grad(torch.gather(sample.input, dim, got.indices), sample.input, dy)
            assert torch.equal(ours, theirs)


@pytest.mark.thorough
def test_topk_derivatives():
    for sample in samples.sample_inputs("topk", torch.float64, 3):
        if sample.args[2:3] != (False,):
            samples.check_derivatives(lambda *a, **k: igt.topk(*a, **k).values, sample)


def test_topk_orders_ties_by_index_and_nan_first():
    x = torch.tensor([[1.0, float("nan"), 3.0, 3.0, -0.0, 0.0], [2.0, 2.0, 2.0, 1.0, 2.0, 0.0]], requires_grad=True)
    values, indices = igt.topk(x, 4)
    assert indices.tolist() == [[1, 2, 3, 0], [0, 1, 2, 4]]
    assert same_bits(values, ig.top_k(numpy(x), 4)[0])
    values.nan_to_num().sum().backward()
    assert x.grad.tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]
    assert igt.topk(torch.tensor(3.0), 1).values.shape == ()


# --- the router -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_the_numpy_router(dtype, options):
    logits = logits_of(dtype).requires_grad_()
    work = torch.float64 if dtype is torch.float64 else torch.float32
    for bias in (None, torch.linspace(-1, 1, 8, dtype=work)):
        weights, experts = igt.moe_router(logits, 3, bias=bias, **options)
        expected = ig.moe_router(numpy(logits), 3, bias=None if bias is None else numpy(bias), **options)
        assert weights.dtype is work
        assert same_bits(weights, expected.weights)
        assert same_bits(experts, expected.experts)
        dweights = torch.randn(6, 3, dtype=work, generator=torch.Generator().manual_seed(1))
        (dlogits,) = torch.autograd.grad(weights, logits, dweights)
        backward = {k: v for k, v in options.items() if k not in ("groups", "group_k")}
        assert same_bits(dlogits, ig.moe_router_backward(numpy(dweights), numpy(logits), expected.experts, **backward))


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_of_the_router(options):
    logits = logits_of(torch.float64, tokens=2).requires_grad_()

    def weights(x):
        return igt.moe_router(x, 3, **options).weights

    assert torch.autograd.gradcheck(weights, (logits,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(weights, (logits,), check_fwd_over_rev=True)
    experts = igt.moe_router(logits, 3, **options).experts
    backward = [options.get(n, d) for n, d in (("scoring", "softmax"), ("renormalize", False), ("scale", 1.0))]
    dweights = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def gradient(dw, x):
        return OPERATOR["moe_router_backward"](dw, x, experts, *backward)

    assert torch.autograd.gradcheck(gradient, (dweights, logits), check_forward_ad=True)


def test_the_router_equals_its_composition():
    logits = logits_of(torch.float32).requires_grad_()
    weights, experts = igt.moe_router(logits, 3)
    values, indices = igt.topk(igt.softmax(logits, -1), 3)
    assert torch.equal(weights, values)
    assert torch.equal(experts, indices)
    dy = torch.randn(6, 3)
    (a,), (b,) = (torch.autograd.grad(t, logits, dy) for t in (weights, values))
    assert torch.equal(a, b)


# --- experts ----------------------------------------------------------------------------------------------------------
def moe(dtype, seed=0):
    """Rows [12, 5] of 6 tokens, their weights, order, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = logits_of(dtype, seed)
    weights, experts = logits.to(torch.promote_types(dtype, torch.float32)).softmax(-1).topk(2)
    order, offsets = experts.flatten().argsort(stable=True), torch.zeros(9, dtype=torch.int64)
    offsets[1:] = experts.flatten().bincount(minlength=8).cumsum(0)
    x = torch.randn(6, 5, generator=generator).to(dtype)
    rows = torch.randn(12, 5, generator=generator).to(dtype)
    return x, rows, weights, experts, order, offsets


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_bits_of_the_numpy_functions(dtype):
    x, rows, weights, experts, order, offsets = moe(dtype)
    expected = ig.expert_permutation(numpy(experts), 8)
    assert same_bits(order, expected.order)
    assert same_bits(offsets, expected.offsets)
    assert same_bits(igt.expert_counts(experts, 8), ig.expert_counts(numpy(experts), 8))
    assert torch.equal(igt.expert_counts(experts, 8), offsets.diff())
    leaves = [t.clone().requires_grad_() for t in (x, rows, weights)]
    y = igt.moe_permute(leaves[0], order, 2)
    assert same_bits(y, ig.moe_permute(numpy(x), numpy(order), 2))
    y.backward(rows)
    assert same_bits(leaves[0].grad, ig.moe_permute_backward(numpy(rows), numpy(order), 2))
    y = igt.moe_combine(*leaves[1:], order)
    assert same_bits(y, ig.moe_combine(numpy(rows), numpy(weights), numpy(order)))
    y.backward(x)
    gradients = ig.moe_combine_backward(numpy(x), numpy(rows), numpy(weights), numpy(order))
    assert same_bits(leaves[1].grad, gradients.d_expert_out)
    assert same_bits(leaves[2].grad, gradients.dweights)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_auxiliary_losses_have_the_bits_of_the_numpy_functions(dtype):
    logits = logits_of(dtype)
    p = igt.softmax(logits, -1).requires_grad_()
    experts = igt.moe_router(logits, 2).experts
    loss = igt.load_balancing_loss(p, experts, 8)
    assert same_bits(loss, ig.load_balancing_loss(numpy(p), numpy(experts)))
    dloss = torch.tensor(0.3, dtype=loss.dtype)
    loss.backward(dloss)
    name = str(dtype).removeprefix("torch.")
    assert same_bits(p.grad, ig.load_balancing_loss_backward(numpy(dloss), numpy(experts), (6, 8), name))
    logits.requires_grad_()
    loss = igt.router_z_loss(logits)
    assert same_bits(loss, ig.router_z_loss(numpy(logits)))
    loss.backward(dloss)
    assert same_bits(logits.grad, ig.router_z_loss_backward(numpy(dloss), numpy(logits)))


@pytest.mark.thorough
def test_derivatives_of_the_moe_operators():
    x, rows, weights, experts, order, _ = moe(torch.float64)
    p = torch.rand(3, 8, dtype=torch.float64, requires_grad=True)
    for function, leaves in (
        (lambda t: igt.moe_permute(t, order, 2).square(), (x[:, :2],)),
        (lambda r, w: igt.moe_combine(r, w, order), (rows[:, :2], weights)),
        (lambda r, w: OPERATOR["moe_combine_backward"](x[:, :2], r, w, order), (rows[:, :2], weights)),
        (lambda t: igt.load_balancing_loss(t, experts[:3]).square(), (p,)),
        (igt.router_z_loss, (p,)),
    ):
        inputs = [t.detach().clone().requires_grad_() for t in leaves]
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


# --- torch's machinery ------------------------------------------------------------------------------------------------
def operators(dtype, seed=0):
    """Every operator with arguments, those of floating point requiring gradients."""
    x, rows, weights, experts, order, _ = moe(dtype, seed)
    x, rows, weights = (t.detach().requires_grad_() for t in (x, rows, weights))
    logits = logits_of(dtype, seed).requires_grad_()
    dloss = weights.detach()[0, 0].requires_grad_()
    return {
        OPERATOR["top_k"]: (logits, 2, 0),
        OPERATOR["moe_router"]: (logits, None, 2, "softmax", True),
        OPERATOR["moe_router_backward"]: (weights, logits, experts, "sigmoid", True, 0.5),
        OPERATOR["expert_counts"]: (experts, 8),
        OPERATOR["expert_permutation"]: (experts, 8),
        OPERATOR["moe_permute"]: (x, order, 2),
        OPERATOR["moe_permute_backward"]: (rows, order, 2),
        OPERATOR["moe_combine"]: (rows, weights, order),
        OPERATOR["moe_combine_backward"]: (x, rows, weights, order),
        OPERATOR["load_balancing_loss"]: (logits, experts),
        OPERATOR["load_balancing_loss_backward"]: (dloss, experts, [6, 8], dtype),
        OPERATOR["router_z_loss"]: (logits,),
        OPERATOR["router_z_loss_backward"]: (dloss, logits),
    }


OPERATORS = list(operators(torch.float32))


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_opcheck(op):
    torch.library.opcheck(op.overload, operators(torch.float32)[op])
    arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16)[op]]
    torch.library.opcheck(op.overload, tuple(arguments))


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_meta_tensors_have_the_layout_of_real_ones(op):
    arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16)[op]]
    real = op(*arguments)
    meta = op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments])
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (real, meta)), strict=True):
        assert layout(a) == layout(b)
        assert b.is_meta


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_vmap_has_the_bits_of_a_loop(op):
    batches = [
        [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.float32, seed)[op]]
        for seed in range(3)
    ]
    positions = [i for i, a in enumerate(batches[0]) if isinstance(a, torch.Tensor)]
    for mapped in (positions, positions[:1]):
        members = [[b[i] if i in mapped else batches[0][i] for i in range(len(b))] for b in batches]
        stacked = [torch.stack([m[i] for m in members], -1) if i in mapped else a for i, a in enumerate(members[0])]
        in_dims = tuple(-1 if i in mapped else None for i in range(len(stacked)))
        got = torch.func.vmap(op, in_dims=in_dims)(*stacked)
        expected = [op(*m) for m in members]
        if isinstance(got, torch.Tensor):
            got, expected = (got,), [(e,) for e in expected]
        for output, each in zip(got, zip(*expected, strict=True), strict=True):
            assert torch.equal(output, torch.stack(each))


def test_vmap_over_biases():
    logits, biases = logits_of(torch.float32), torch.randn(3, 8)
    got = torch.func.vmap(lambda b: igt.moe_router(logits, 2, bias=b), in_dims=0)(biases)
    assert torch.equal(got.experts, torch.stack([igt.moe_router(logits, 2, bias=b).experts for b in biases]))


def layer(x, gate, inner):
    """A mixture of experts, whose experts differ by a factor."""
    logits = x @ gate
    weights, experts = igt.moe_router(logits, 2, renormalize=True)
    order, offsets = igt.expert_permutation(experts, gate.shape[1])
    rows = igt.moe_permute(x, order, 2)
    owners = (torch.arange(len(rows))[:, None] >= offsets[1:]).sum(-1)
    y = igt.moe_combine(rows * igt.embedding(owners, inner), weights, order)
    best = igt.topk(logits, 1).values.sum()
    return y, igt.load_balancing_loss(igt.softmax(logits, -1), experts) + igt.router_z_loss(logits) + best


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    gate, inner = torch.randn(5, 8), torch.randn(8, 5)
    for tokens in (6, 9):
        x = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(tokens))
        leaves = [[t.clone().requires_grad_() for t in (x, gate, inner)] for _ in range(2)]
        got, expected = compiled(*leaves[0]), layer(*leaves[1])
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        (got[0].square().sum() + got[1]).backward()
        (expected[0].square().sum() + expected[1]).backward()
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.thorough
def test_torch_func_through_a_layer():
    gate, inner = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    x = torch.randn(3, 4, 5, dtype=torch.float64)

    def loss(g, tokens):
        y, auxiliary = layer(tokens, g, inner)
        return y.square().sum() + auxiliary

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(gate, x)
    # Not the bits: the layer's products are torch's, whose order may be another one in a batch.
    torch.testing.assert_close(each, torch.stack([torch.func.grad(loss)(gate, t) for t in x]))
    hessian = torch.func.hessian(lambda g: loss(g, x[0]))(gate)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.grad(lambda g: loss(g, x[0])))(gate))


# --- errors -----------------------------------------------------------------------------------------------------------
def test_arguments_that_no_operator_could_serve():
    x, rows, weights, experts, order, _ = moe(torch.float32)
    logits = logits_of(torch.float32)
    for call, error, message in (
        (lambda: igt.topk(logits, 9), ig.InvalidProblemError, "k is 9; accepted: 1 to 8"),
        (lambda: igt.topk(logits, 1, 2), ig.InvalidProblemError, "dim is 2"),
        (lambda: igt.topk(logits.long(), 1), ig.UnsupportedError, "input has dtype torch.int64"),
        (lambda: igt.moe_router(logits, 9), ig.InvalidProblemError, "k is 9"),
        (lambda: igt.moe_router(logits[0, 0], 1), ig.InvalidProblemError, "logits has shape \\(\\)"),
        (lambda: igt.moe_router(logits, 2, scoring="tanh"), ig.InvalidProblemError, "scoring is 'tanh'"),
        (lambda: igt.moe_router(logits, 2, scale="2"), ig.InvalidProblemError, "scale is '2'"),
        (lambda: igt.moe_router(logits, 2, scale=1e39), ig.InvalidProblemError, "finite in float32"),
        (lambda: igt.moe_router(logits, 2, groups=3), ig.InvalidProblemError, "groups is 3"),
        (lambda: igt.moe_router(logits, 2, bias=logits[0].double()), ig.InvalidProblemError, "bias has dtype"),
        (lambda: igt.moe_router(logits, 2, bias=logits[0].to("meta")), ig.DeviceMismatchError, "bias is on meta"),
        (
            lambda: igt.moe_permute(x, order.int(), 2),
            ig.InvalidProblemError,
            "order has dtype torch.int32; expected int64",
        ),
        (lambda: igt.moe_permute(x, order[1:], 2), ig.InvalidProblemError, "order has shape"),
        (lambda: igt.moe_permute(x[0], order, 2), ig.InvalidProblemError, "x has shape"),
        (lambda: igt.moe_combine(rows, weights[1:], order), ig.InvalidProblemError, "expert_out has shape"),
        (lambda: igt.moe_combine(rows.double(), weights, order), ig.InvalidProblemError, "dtype torch.float32"),
        (lambda: igt.load_balancing_loss(logits, experts[1:]), ig.InvalidProblemError, "experts has shape"),
        (lambda: igt.load_balancing_loss(logits, experts, 7), ig.InvalidProblemError, "num_experts is 7"),
        (lambda: igt.expert_counts(experts, 3), ig.IndexOutOfRangeError, "experts"),
        (lambda: igt.expert_counts(weights, 3), ig.UnsupportedError, "experts has dtype torch.float32"),
        (lambda: igt.router_z_loss(logits.long()), ig.UnsupportedError, "logits has dtype"),
    ):
        with pytest.raises(error, match=message):
            call()
