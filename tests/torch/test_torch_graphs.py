"""How many graphs torch.compile makes: at most two for eight sizes or eight numbers, for every operator."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from torch._dynamo.backends.registry import lookup_backend

import isograd as ig
import isograd.torch as igt
from isograd.torch import exported

pytestmark = pytest.mark.usefixtures("one_thread")
FLOATS = [0.1 * i for i in range(1, 9)]
INTEGERS = list(range(3, 11))
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
Q = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(1))
K, LENGTHS = Q.repeat(1, 1, 2, 1), torch.tensor([6, 3], dtype=torch.int32)
TARGETS = torch.tensor([0, 3, 2, 1])


def rows(n):
    return torch.linspace(-1, 1, n * 16).reshape(n, 16)


SHARES, CHOSEN = torch.rand(12, 2, generator=torch.Generator().manual_seed(2)), torch.arange(24).reshape(12, 2) % 8

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
    "attention_with_cache batch": (
        lambda q, v: igt.attention_with_cache(*[q[:v].detach()] * 3, torch.arange(v, dtype=torch.int32)) * q.sum(),
        Q.repeat(6, 1, 2, 1),
        INTEGERS,
    ),
    "attention_with_cache length": (
        lambda q, v: igt.attention_with_cache(q[:, :, :v].detach(), K, K, LENGTHS) * q.sum(),
        Q.repeat(1, 1, 2, 1),
        INTEGERS,
    ),
    "attention_with_cache window": (
        lambda q, v: igt.attention_with_cache(*[q.detach()] * 3, LENGTHS, window=(v, None)) * q.sum(),
        Q,
        INTEGERS,
    ),
    "sdpa batch": (lambda q, v: igt.scaled_dot_product_attention(q[:v], q[:v], q[:v]), Q.repeat(6, 1, 1, 1), INTEGERS),
    "gather": (lambda x, v: igt.gather(x[:v], 1, x[:v].argsort(1)), rows(12), INTEGERS),
    "moe_permute": (lambda x, v: igt.moe_permute(x[:v], torch.arange(2 * v), 2), rows(12), INTEGERS),
    "router_z_loss": (lambda x, v: igt.router_z_loss(x[:v]), rows(12), INTEGERS),
    "log_softmax": (lambda x, v: igt.log_softmax(x[:v], -1), rows(12), INTEGERS),
    "softmax_backward": (lambda x, v: igt.softmax_backward(x[:v], X[:1].expand(v, 16), -1), rows(12), INTEGERS),
    "log_softmax_backward": (lambda x, v: igt.log_softmax_backward(x[:v], x[:v], -1), rows(12), INTEGERS),
    "sparsemax": (lambda x, v: igt.sparsemax(x[:v]), rows(12), INTEGERS),
    "kl_div": (lambda x, v: igt.kl_div(x[:v], x[:v], log_target=True), rows(12), INTEGERS),
    "distillation_loss": (lambda x, v: igt.distillation_loss(x[:v], x[:v].detach()), rows(12), INTEGERS),
    "linear_cross_entropy": (lambda x, v: igt.linear_cross_entropy(x[:v], x, torch.arange(v)), rows(12), INTEGERS),
    "linear": (lambda x, v: igt.linear(x[:v], x, x[:, 0]), rows(12), INTEGERS),
    "grouped_linear": (lambda x, v: igt.grouped_linear(x[:v], torch.stack([X, -X]), [0, 2, v]), rows(12), INTEGERS),
    "matmul": (lambda x, v: igt.matmul(x[:v], x.T), rows(12), INTEGERS),
    "index_select": (lambda x, v: igt.index_select(x, 0, torch.arange(v)), rows(12), INTEGERS),
    "index_add": (lambda x, v: igt.index_add(x, 0, torch.arange(v), x[:v]), rows(12), INTEGERS),
    "take_along_dim": (lambda x, v: igt.take_along_dim(x[:v], x[:v].argsort(1), 1), rows(12), INTEGERS),
    "scatter_add": (lambda x, v: igt.scatter_add(x[:v], 1, x[:v].argsort(1), x[:v]), rows(12), INTEGERS),
    "moe_combine": (lambda x, v: igt.moe_combine(x[: 2 * v], SHARES[:v], torch.arange(2 * v)), rows(20), INTEGERS),
    "load_balancing_loss": (lambda x, v: igt.load_balancing_loss(x[:v], CHOSEN[:v]), rows(12), INTEGERS),
    "expert_counts": (lambda x, v: igt.expert_counts(CHOSEN[:v], 8) * x.sum(), rows(12), INTEGERS),
    "expert_permutation": (lambda x, v: igt.expert_permutation(CHOSEN[:v], 8)[0] * x.sum(), rows(12), INTEGERS),
}
QUICK = (
    "attention scale",
    "cross_entropy z_loss",
    "cross_entropy count",
    "gumbel_softmax seed",
    "attention batch",
    "kl_div",
)
# Classes, and what registers or switches.
CLASSES = {"CrossEntropyLoss", "KLDivLoss", "LogSoftmax", "Softmax"}
OTHERS = CLASSES | {"register_transformers", "optim", "clip_grad_norm_", "get_total_norm", *igt._LATE}


def test_no_operator_is_left_out():
    listed = {name.partition(" ")[0].replace("sdpa", "scaled_dot_product_attention") for name in CALLS}
    # Functions of `isograd.ops` are counted in tests of their own.
    assert set(igt.__all__) - OTHERS == listed | set(exported.__all__)


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


def graphs_of_a_model(call, values):
    """How many graphs torch.compile makes of a call of a model, whose result is differentiated."""
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend)
    for value in values:
        compiled(value).square().sum().backward()
    return graphs


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [[(n, 6) for n in INTEGERS], [(2, n) for n in INTEGERS]], ids=["batch", "length"])
def test_a_transformers_model_makes_as_many_graphs_as_with_torch(sizes):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    igt.register_transformers()
    found = {}
    for implementation in ("isograd", "sdpa"):
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        values = [torch.arange(b * n).reshape(b, n) % 32 for b, n in sizes]
        found[implementation] = graphs_of_a_model(lambda ids, m=model: m(ids, use_cache=False).logits, values)
    assert found["isograd"] <= max(2, found["sdpa"])


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "length"])
def test_a_model_inside_the_switch_makes_as_many_graphs_as_outside(axis):
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
    values = [torch.ones(n, 6, 32) if axis == 0 else torch.ones(2, n, 32) for n in INTEGERS]

    def call(x):
        return torch.softmax(layer(x), -1)

    alone = graphs_of_a_model(call, values)
    with igt.use():
        assert graphs_of_a_model(call, values) <= max(2, alone)


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


@pytest.mark.parametrize("name", ["gumbel_softmax seed", "gumbel_softmax offset", "attention seed"])
def test_words_of_64_bits_reach_a_graph_whose_symbols_have_63(name):
    function, tensor, _ = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for value in (5, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1):
        assert torch.equal(compiled(tensor, value), function(tensor, value))
    broken = torch.compile(function, backend="aot_eager", dynamic=True)  # no graph can raise
    message = name.replace(" ", ": ") + " is {}; accepted: integers from 0 to 2"
    for value in (-1, 2**64):
        with pytest.raises(ig.InvalidProblemError, match=message.format(value)):
            broken(tensor, value)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gumbel_softmax seed", "attention seed"])
def test_inductor_computes_the_words_of_a_symbol(name):
    function, tensor, _ = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for value in (5, 4, 2**62 + 3):
        assert torch.equal(compiled(tensor, value), function(tensor, value))
