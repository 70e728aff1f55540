"""How many graphs torch.compile makes: at most two for eight sizes or eight numbers, for every operator."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from torch._dynamo.backends.registry import lookup_backend

import isograd.torch as igt

pytestmark = pytest.mark.usefixtures("one_thread")
FLOATS = [0.1 * i for i in range(1, 9)]
INTEGERS = list(range(3, 11))
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
Q = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 3, 2, 1])


def rows(n):
    return torch.linspace(-1, 1, n * 16).reshape(n, 16)


# name: (function of a tensor that is differentiated and a value, the tensor, values)
CALLS = {
    "attention scale": (lambda q, v: igt.attention(q, q, q, scale=v), Q, FLOATS),
    "attention softcap": (lambda q, v: igt.attention(q, q, q, softcap=v), Q, FLOATS),
    "attention dropout_p": (lambda q, v: igt.attention(q, q, q, dropout_p=v, seed=1), Q, FLOATS),
    "attention seed": (lambda q, v: igt.attention(q, q, q, dropout_p=0.5, seed=v), Q, INTEGERS),
    "attention window": (lambda q, v: igt.attention(q, q, q, window=(v, 2)), Q, INTEGERS),
    "sdpa scale": (lambda q, v: igt.scaled_dot_product_attention(q, q, q, scale=v), Q, FLOATS),
    "cross_entropy label_smoothing": (lambda x, v: igt.cross_entropy(x, TARGETS, label_smoothing=v), X, FLOATS),
    "cross_entropy z_loss": (lambda x, v: igt.cross_entropy(x, TARGETS, z_loss=v), X, FLOATS),
    "cross_entropy count": (lambda x, v: igt.cross_entropy(x, TARGETS, count=v), X, INTEGERS),
    "cross_entropy ignore_index": (lambda x, v: igt.cross_entropy(x, TARGETS, ignore_index=v), X, INTEGERS),
    "linear_cross_entropy z_loss": (lambda x, v: igt.linear_cross_entropy(x, x, TARGETS, z_loss=v), X, FLOATS),
    "linear_cross_entropy count": (lambda x, v: igt.linear_cross_entropy(x, x, TARGETS, count=v), X, FLOATS),
    "linear_cross_entropy chunk": (lambda x, v: igt.linear_cross_entropy(x, x, TARGETS, chunk=v), X, INTEGERS),
    "distillation_loss temperature": (lambda x, v: igt.distillation_loss(x, X, v), X, FLOATS),
    "gumbel_softmax tau": (lambda x, v: igt.gumbel_softmax(x, v, seed=3), X, FLOATS),
    "gumbel_softmax seed": (lambda x, v: igt.gumbel_softmax(x, seed=v), X, INTEGERS),
    "gumbel_softmax offset": (lambda x, v: igt.gumbel_softmax(x, seed=3, offset=v), X, INTEGERS),
    "moe_router scale": (lambda x, v: igt.moe_router(x, 2, scale=v)[0], X, FLOATS),
    "moe_router k": (lambda x, v: igt.moe_router(x, v)[0], X, INTEGERS),
    "topk k": (lambda x, v: igt.topk(x, v)[0], X, INTEGERS),
    "index_add alpha": (lambda x, v: igt.index_add(x, 0, TARGETS, x, alpha=v), X, FLOATS),
    "embedding padding_idx": (lambda x, v: igt.embedding(TARGETS, x, padding_idx=v), rows(12), INTEGERS),
    "softmax rows": (lambda x, v: igt.softmax(x[:v], -1), rows(12), INTEGERS),
    "cross_entropy rows": (lambda x, v: igt.cross_entropy(x[:v], torch.arange(v)), rows(12), INTEGERS),
    "attention batch": (lambda q, v: igt.attention(q[:v], q[:v], q[:v]), Q.repeat(6, 1, 1, 1), INTEGERS),
    "attention heads": (lambda q, v: igt.attention(q[:, :v], q[:, :v], q[:, :v]), Q.repeat(1, 6, 1, 1), INTEGERS),
    "attention length": (lambda q, v: igt.attention(q[:, :, :v], q, q), Q.repeat(1, 1, 2, 1), INTEGERS),
    "sdpa batch": (lambda q, v: igt.scaled_dot_product_attention(q[:v], q[:v], q[:v]), Q.repeat(6, 1, 1, 1), INTEGERS),
    "gather": (lambda x, v: igt.gather(x[:v], 1, x[:v].argsort(1)), rows(12), INTEGERS),
    "moe_permute": (lambda x, v: igt.moe_permute(x[:v], torch.arange(2 * v), 2), rows(12), INTEGERS),
    "router_z_loss": (lambda x, v: igt.router_z_loss(x[:v]), rows(12), INTEGERS),
}
QUICK = ("attention scale", "cross_entropy z_loss", "cross_entropy count", "gumbel_softmax seed", "attention batch")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in CALLS])
def test_two_graphs_serve_eight_values(name):
    function, tensor, values = CALLS[name]
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for value in values:
        a, b = (tensor.clone().requires_grad_() for _ in range(2))
        found, expected = compiled(a, value), function(b, value)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(a.grad, b.grad)
    assert graphs <= 2


@pytest.mark.parametrize("axis", [0, 2])
def test_export_with_a_dynamic_axis(axis):
    class Model(torch.nn.Module):
        def forward(self, q):
            return igt.attention(q, q, q), igt.scaled_dot_product_attention(q, q, q)

    sizes = {axis: torch.export.Dim.DYNAMIC}
    q = Q.repeat(3, 1, 3, 1)
    program = torch.export.export(Model(), (q,), dynamic_shapes=(sizes,))
    part = q.narrow(axis, 0, 4)
    assert torch.equal(program.module()(part)[0], igt.attention(part, part, part))


def test_sizes_that_depend_on_data():
    mask = torch.tensor([True, False, True, True])

    def function(x):
        return igt.gather(x[mask], 1, x[mask].argsort(1))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(X), function(X))


def test_compiled_autograd():
    a, b = (X.clone().requires_grad_() for _ in range(2))
    loss = igt.softmax(a, -1).square().sum() + igt.cross_entropy(a, TARGETS)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    (igt.softmax(b, -1).square().sum() + igt.cross_entropy(b, TARGETS)).backward()
    assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", ["jvp", "jacfwd", pytest.param("hessian", marks=pytest.mark.thorough)])
def test_compiled_forward_mode(name):
    def function(x):
        return igt.softmax(x, -1).square().sum()

    def transformed(x):
        if name == "jvp":
            return torch.func.jvp(function, (x,), (x,))[1]
        return getattr(torch.func, name)(function)(x)

    torch._dynamo.reset()
    x = X[:2, :4]
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), transformed(x))
