"""`isograd.torch.use()`: an unmodified model on isograd's kernels, and the list of what was replaced."""

import threading
import warnings

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import isograd as ig
import isograd.torch as igt


def test_every_spelling_is_replaced():
    x = torch.randn(3, 4)
    with igt.use() as switch:
        results = [
            torch.softmax(x, 1),
            torch.softmax(x, dim=1, dtype=torch.float32),
            torch.special.softmax(x, 1),
            F.softmax(x, dim=1),
            F.softmax(x, 1, 3, torch.float32),
            x.softmax(1),
            x.softmax(dim=-1),
            torch.nn.Softmax(1)(x),
            torch.nn.Softmax2d()(x.reshape(3, 4, 1, 1)).reshape(3, 4),
            torch.softmax(x, 1, out=torch.empty(3, 4)),
        ]
        logs = [
            torch.log_softmax(x, 1),
            torch.special.log_softmax(x, 1),
            F.log_softmax(x, dim=1),
            x.log_softmax(1),
            torch.nn.LogSoftmax(1)(x),
        ]
    assert all(torch.equal(y, igt.softmax(x, 1)) for y in results)
    assert all(torch.equal(y, igt.log_softmax(x, 1)) for y in logs)
    report = switch.report()
    assert report.not_replaced == {}
    assert report.replaced == {
        "torch.softmax": 3,
        "torch.special.softmax": 1,
        "torch.nn.functional.softmax": 4,
        "torch.Tensor.softmax": 2,
        "torch.log_softmax": 1,
        "torch.special.log_softmax": 1,
        "torch.nn.functional.log_softmax": 2,
        "torch.Tensor.log_softmax": 1,
    }
    assert "torch.Tensor.softmax" in str(report)
    assert str(igt.use().report()) == "nothing was called that isograd computes"


def test_functions_that_call_softmax_are_replaced_inside():
    x = torch.randn(3, 4)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    words = torch.randn(2, 5, 8)
    adaptive = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4])
    with igt.use() as switch:
        assert torch.equal(F.softmin(x, dim=1), igt.softmax(-x, 1))
        assert F.gumbel_softmax(x, dim=-1).shape == x.shape
        assert switch.report().replaced == {"torch.Tensor.softmax": 2}
        _, weights = attention(words, words, words)
        assert switch.report().replaced["torch.nn.functional.softmax"] == 1
        adaptive(words.reshape(10, 8), torch.arange(10))
    assert torch.allclose(weights.sum(-1), torch.ones(2, 5))
    assert switch.report().replaced["torch.nn.functional.log_softmax"] == 2
    assert not any("softmax" in name for name in switch.report().not_replaced)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_served_is_left_to_torch_and_listed():
    class Subclass(torch.Tensor):
        pass

    x = torch.randn(2, 3)
    with igt.use() as switch:
        assert torch.equal(torch.softmax(torch.arange(3), 0, dtype=torch.float32), igt.softmax(torch.arange(3.0), 0))
        with pytest.raises(NotImplementedError):
            torch.softmax(torch.arange(3), 0)
        with pytest.raises(IndexError):  # torch's own error for a wrong dim
            torch.softmax(x, 5)
        with pytest.raises(NotImplementedError):
            torch.softmax(x.to(torch.float8_e5m2), 0)
        assert torch.softmax(torch.ones([1] * 9), 0).dim() == 9
        assert isinstance(torch.softmax(x.as_subclass(Subclass), 0), Subclass)
        torch.sparse.softmax(x.to_sparse(), 1)
        F.softmax(x)  # without a dim torch guesses one
        fused = hasattr(F, "linear_cross_entropy")  # torch 2.13
        if fused:
            F.linear_cross_entropy(x, torch.randn(4, 3), torch.tensor([0, 1]))
    report = switch.report()
    assert report.replaced == {"torch.softmax": 1, "torch.nn.functional.softmax": 1}
    listed = {"torch.softmax": 5, "torch.sparse.softmax": 1}
    assert report.not_replaced == listed | ({"torch.nn.functional.linear_cross_entropy": 1} if fused else {})
    reasons = "\n".join(line.reason for line in report.lines if not line.replaced)
    for part in ("dtype torch.int64", "dim is 5", "dtype torch.float8_e5m2", "rank 9", "Subclass"):
        assert part in reasons
    assert "fused operation" in reasons  # torch.sparse.softmax
    assert "left to torch: " in str(report)


def test_indexing_and_losses_are_replaced():
    x, index = torch.randn(3, 4), torch.tensor([[0, 2, 2], [1, 1, 3], [3, 0, 0]])
    rows, targets = torch.tensor([2, 0, 2]), torch.tensor([1, 0, 3])
    weight, p = torch.rand(4), torch.softmax(torch.randn(3, 4), -1)
    calls = {
        "torch.gather": (lambda: torch.gather(x, 1, index), igt.gather(x, 1, index)),
        "torch.Tensor.gather": (lambda: x.gather(dim=1, index=index), igt.gather(x, 1, index)),
        "torch.take_along_dim": (lambda: torch.take_along_dim(x, index, 1), igt.take_along_dim(x, index, 1)),
        "torch.Tensor.take_along_dim": (lambda: x.take_along_dim(index), igt.take_along_dim(x, index)),
        "torch.scatter_add": (lambda: torch.scatter_add(x, 1, index, p), igt.scatter_add(x, 1, index, p)),
        "torch.Tensor.scatter_add": (lambda: x.scatter_add(1, index, src=p), igt.scatter_add(x, 1, index, p)),
        "torch.Tensor.scatter_add_": (lambda: x.clone().scatter_add_(1, index, p), igt.scatter_add(x, 1, index, p)),
        "torch.index_add": (lambda: torch.index_add(x, 0, rows, p, alpha=2), igt.index_add(x, 0, rows, p, alpha=2)),
        "torch.Tensor.index_add": (lambda: x.index_add(0, rows, p), igt.index_add(x, 0, rows, p)),
        "torch.Tensor.index_add_": (lambda: x.clone().index_add_(0, rows, p), igt.index_add(x, 0, rows, p)),
        "torch.index_select": (lambda: torch.index_select(x, 0, rows), igt.index_select(x, 0, rows)),
        "torch.Tensor.index_select": (lambda: x.index_select(0, rows), igt.index_select(x, 0, rows)),
        "torch.topk": (lambda: torch.topk(x, 2).values, igt.topk(x, 2).values),
        "torch.Tensor.topk": (lambda: x.topk(2, 0)[1], igt.topk(x, 2, 0).indices),
        "torch.nn.functional.embedding": (
            lambda: F.embedding(rows, x, padding_idx=0) + torch.nn.Embedding.from_pretrained(x)(rows),
            2 * igt.embedding(rows, x),
        ),
        "torch.nn.functional.cross_entropy": (
            lambda: F.cross_entropy(x, targets, weight) + torch.nn.CrossEntropyLoss(label_smoothing=0.1)(x, p),
            igt.cross_entropy(x, targets, weight) + igt.cross_entropy(x, p, label_smoothing=0.1),
        ),
        "torch.nn.functional.kl_div": (
            lambda: F.kl_div(x, p, reduction="sum") + torch.nn.KLDivLoss(reduction="batchmean")(x, p),
            igt.kl_div(x, p, reduction="sum") + igt.kl_div(x, p, reduction="batchmean"),
        ),
    }
    for name, (call, expected) in calls.items():
        with igt.use() as switch:
            assert torch.equal(call(), expected), name
        assert list(switch.report().replaced) == [name]
        assert not switch.report().not_replaced


@pytest.mark.filterwarnings("ignore")
def test_indexing_and_losses_that_are_left_to_torch():
    class Subclass(torch.Tensor):
        pass

    x, index = torch.randn(3, 4), torch.tensor([[0, 2], [1, 1], [3, 0]])
    cases = [
        ("torch.gather", lambda: torch.gather(x.long(), 1, index), "input has dtype torch.int64"),
        ("torch.gather", lambda: torch.gather(x, 1, index, out=torch.empty(3, 2)), "out"),
        ("torch.gather", lambda: torch.gather(x, 1, index, sparse_grad=True), "sparse_grad is True"),
        ("torch.topk", lambda: torch.topk(x, 2, largest=False), "largest is False"),
        ("torch.topk", lambda: torch.topk(x, 0), "k is 0"),
        ("torch.nn.functional.embedding", lambda: F.embedding(index % 3, x.clone(), max_norm=1.0), "max_norm is 1.0"),
        ("torch.nn.functional.cross_entropy", lambda: F.cross_entropy(x, index[:, 0], reduce=False), "reduce is False"),
        ("torch.nn.functional.kl_div", lambda: F.kl_div(x, x[:1].exp()), "target has shape"),
        ("torch.nn.functional.embedding_bag", lambda: F.embedding_bag(index % 3, x), "adds up repeated indices"),
        ("torch.Tensor.scatter_reduce", lambda: x.scatter_reduce(1, index, x, "sum"), "adds up repeated indices"),
        ("torch.scatter_add", lambda: torch.scatter_add(x.as_subclass(Subclass), 1, index, x), "Subclass"),
    ]
    for name, call, reason in cases:
        expected = call()
        with igt.use() as switch:
            got = call()
        (line,) = switch.report().lines
        assert (line.function, line.replaced) == (name, False)
        assert reason in line.reason
        for a, b in zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),):
            assert torch.equal(a, b)
    errors = [
        (lambda: torch.gather(x, 1, torch.tensor([[4]])), RuntimeError),
        (lambda: F.embedding(torch.tensor([5]), x), IndexError),
        (lambda: F.cross_entropy(x, torch.tensor([0, 1, 4])), IndexError),
        (lambda: F.cross_entropy(x, x, ignore_index=1), RuntimeError),
        (lambda: x.requires_grad_().index_add_(0, torch.tensor([0]), x[:1]), RuntimeError),  # a leaf in place
    ]
    for call, error in errors:
        with igt.use(), pytest.raises(error) as caught:
            call()
        assert "isograd" not in str(type(caught.value))  # torch's own


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_sums_in_an_order_of_torch_are_listed():
    x, rows, index = torch.randn(3, 4, requires_grad=True), torch.tensor([2, 0, 2]), torch.tensor([[0, 2], [1, 1]])
    base = torch.zeros(3, 4)
    cases = {
        "torch.index_put": lambda: torch.index_put(base, (rows,), x, True),
        "torch.Tensor.index_put_": lambda: base.clone().index_put_((rows,), x.detach(), accumulate=True),
        "torch.Tensor.put_": lambda: base.clone().put_(rows, x.detach()[:, 0], True),
        "torch.Tensor.__getitem__": lambda: (x[rows], x[:, [0, 0]], x[None, rows, ..., 1:]),
        "torch.take": lambda: torch.take(x, rows),
        "torch.bincount": lambda: torch.bincount(rows, x.detach()[:, 0]),
        "torch.Tensor.bincount": lambda: rows.bincount(weights=x.detach()[:, 0]),
        "torch.Tensor.scatter_": lambda: base.clone().scatter_(1, index, x.detach(), reduce="add"),
        "torch.Tensor.matmul": lambda: x @ x.T,
        "torch.einsum": lambda: torch.einsum("ij,kj->ik", x, x),
        "torch.nn.functional.linear": lambda: torch.nn.Linear(4, 2)(x),
        "torch.nn.functional.group_norm": lambda: torch.nn.GroupNorm(2, 4)(x[..., None]),
        "torch.Tensor.mean": lambda: x.mean(-1),
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(x),
        "torch.nn.functional.mse_loss": lambda: F.mse_loss(x, base),
    }
    for name, call in cases.items():
        with igt.use() as switch:
            call()
        assert list(switch.report().not_replaced) == [name]
        assert not switch.report().replaced
    exact = {
        "assigned": lambda: base.clone().index_put_((rows,), x.detach()),
        "written": lambda: base.clone().scatter_(1, index, x.detach()),
        "counted": lambda: torch.bincount(rows),
        "without a gradient": lambda: base[rows],
        "slices and masks": lambda: (x[1:], x[0, None], x[base > 0]),
        "integers": lambda: rows.sum() + (base > 0).sum(),
    }
    for name, call in exact.items():
        with igt.use() as switch:
            call()
        assert not switch.report().lines, name


def test_norms_are_replaced():
    x, norm = torch.randn(5, 3, 4, requires_grad=True), torch.nn.RMSNorm((3, 4), eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    with igt.use() as switch:
        found = norm(x)
        other = torch.rms_norm(x, (4,))
    assert switch.report().replaced == {"torch.nn.functional.rms_norm": 1, "torch.rms_norm": 1}
    assert torch.equal(found, igt.rms_norm(x, (3, 4), norm.weight, 1e-3))
    assert torch.equal(other, igt.rms_norm(x, (4,)))
    given = torch.autograd.grad(found.sum(), (x, norm.weight), retain_graph=True)
    expected = torch.autograd.grad(norm(x).sum(), (x, norm.weight))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(given, expected, strict=True))
    with igt.use() as switch, warnings.catch_warnings(action="ignore"):  # torch's, of the mixture
        F.rms_norm(x.bfloat16(), (4,), torch.ones(4))
    assert switch.report().not_replaced == {"torch.nn.functional.rms_norm": 1}


def test_layer_norms_are_replaced():
    x, norm = torch.randn(5, 3, 4, requires_grad=True), torch.nn.LayerNorm((3, 4), eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    with igt.use() as switch:
        found = norm(x)
        other = torch.layer_norm(x, (4,), None, None, 1e-3, False)
    assert switch.report().replaced == {"torch.nn.functional.layer_norm": 1, "torch.layer_norm": 1}
    assert torch.equal(found, igt.layer_norm(x, (3, 4), norm.weight, norm.bias, 1e-3))
    assert torch.equal(other, igt.layer_norm(x, (4,), eps=1e-3))
    with igt.use() as switch:  # which torch computes, with weights of float32
        F.layer_norm(x.bfloat16(), (4,), torch.ones(4), torch.zeros(4))
    assert switch.report().not_replaced == {"torch.nn.functional.layer_norm": 1}


def test_activations_are_replaced():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    modules = (torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh"))
    with igt.use() as switch:
        found = [F.silu(x), F.gelu(x, approximate="tanh"), *[m(x) for m in modules]]
    expected = [igt.silu(x), igt.gelu(x, "tanh"), igt.silu(x), igt.gelu(x), igt.gelu(x, "tanh")]
    assert all(map(torch.equal, found, expected))
    assert switch.report().replaced == {"torch.nn.functional.silu": 2, "torch.nn.functional.gelu": 3}
    leaf = x.clone().requires_grad_()
    y = leaf * 1
    with igt.use():
        torch.nn.SiLU(inplace=True)(y)
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(y, igt.silu(x))
    assert torch.equal(gradient, ig.silu_backward(torch.ones_like(x), x))
    with igt.use() as switch:
        F.silu(torch.ones(2, dtype=torch.complex64))
    assert switch.report().not_replaced == {"torch.nn.functional.silu": 1}


def test_dropout_of_samples_does_not_depend_on_how_a_step_is_split():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Dropout(0.3), torch.nn.Dropout(0.5, inplace=True)

        def inner(self, x):
            return self.two(self.one(x.flatten(0, 1)) * 1).square().view(x.shape)

        def forward(self, x, checkpointed=False):
            x = torch.dropout(x, 0.1, True)
            return checkpoint(self.inner, x, use_reentrant=False) if checkpointed else self.inner(x)

    model, x = Model(), torch.rand(8, 3, 5, generator=torch.Generator().manual_seed(0)) + 1

    def step(size, checkpointed=False):
        found = []
        for first in range(0, 8, size):
            samples = range(first, first + size)
            torch.manual_seed(3)
            leaf = x[first : first + size].clone().requires_grad_()
            with igt.use(samples=samples) as switch:
                y = model(leaf, checkpointed)
                y.sum().backward()
            assert torch.equal(leaf.grad == 0, y == 0)
            assert switch.report().replaced["torch.nn.functional.dropout"] == 2 * (1 + checkpointed)
            found.append(torch.stack([y.detach(), leaf.grad], 1))
        return torch.cat(found)

    whole = step(8)
    assert 0.5 < (whole[:, 0] == 0).float().mean() < 0.85
    assert all(torch.equal(step(size), whole) for size in (1, 2, 4))
    assert torch.equal(step(4, True), whole)
    with igt.use() as switch:
        model(x)
    assert switch.report().replaced == {}
    with igt.use(samples=range(7)) as switch:
        torch.nn.Dropout()(x)
        assert torch.nn.Dropout().eval()(x) is x
    assert switch.report().not_replaced == {"torch.nn.functional.dropout": 1}
    kinds = ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"]
    with igt.use() as plain, igt.use(samples=range(7)) as switch:
        for kind in kinds:
            x = torch.ones(7, 3, *(2,) * int(kind[-2] if kind[-2].isdigit() else 1))
            getattr(torch.nn.functional, kind)(x, 0.5, True)
            getattr(torch.nn.functional, kind)(x, 0.5, training=False)
        torch.dropout_(torch.ones(7), 0.5, True)
    assert switch.report().not_replaced == {f"torch.nn.functional.{kind}": 1 for kind in kinds} | {"torch.dropout_": 1}
    assert not plain.report().not_replaced
    with igt.use(samples=range(7)) as switch:
        torch.vmap(torch.nn.functional.dropout, randomness="different")(torch.ones(2, 7))
    assert switch.report().not_replaced == {"torch.nn.functional.dropout": 1}
    for wrong in (4, range(0), range(-1, 3), range(0, 8, 2)):
        with pytest.raises(ig.InvalidProblemError, match="use: samples is"):
            igt.use(samples=wrong)


def test_the_switch_as_a_decorator():
    x = torch.randn(2, 3)
    switch = igt.use()

    @switch
    def softmax(t, depth=0):
        """Softmax, some calls deep."""
        return softmax(t, depth - 1) if depth else torch.softmax(t, -1)

    @igt.use()
    def fails():
        raise KeyError

    @igt.use
    def rows(t):
        for row in t:
            yield torch.softmax(row, -1)

    assert softmax.__doc__ == "Softmax, some calls deep."
    for depth in (0, 2):
        assert torch.equal(softmax(x, depth), igt.softmax(x, -1))
    with switch:
        softmax(x)
    assert switch.report().replaced == {"torch.softmax": 3}
    with pytest.raises(KeyError):
        fails()
    with igt.use() as outer:
        found = []
        for row in rows(x):
            found.append(row)
            torch.log_softmax(row, -1)
    assert torch.equal(torch.stack(found), igt.softmax(x, -1))
    assert outer.report().replaced == {"torch.log_softmax": 2}
    torch.log_softmax(x, -1)
    assert switch.report().replaced == {"torch.softmax": 3}

    async def coroutine():
        pass

    for wrong in (3, torch.nn.Softmax, coroutine):
        with pytest.raises(ig.InvalidProblemError, match="use: function is"):
            igt.use()(wrong)


def test_a_call_in_a_block_within_a_block_is_listed_once():
    x, switch = torch.randn(2, 3), igt.use()
    with switch, igt.use() as other, switch:
        torch.softmax(x, -1)
        torch.mm(x, x.T)
    assert switch.report().replaced == {"torch.softmax": 1}
    assert switch.report().not_replaced == {"torch.mm": 1}
    assert other.report().not_replaced == {"torch.mm": 1}


def test_compiled_code_is_in_every_report():
    torch._dynamo.reset()
    x = torch.randn(2, 3)
    compiled = torch.compile(lambda t: torch.softmax(t, -1), backend="eager")
    module = torch.nn.Softmax(-1)
    module.compile(backend="eager")
    reports = []
    for _ in range(2):
        with igt.use() as switch:
            assert torch.equal(compiled(x), igt.softmax(x, -1))
        reports.append(switch.report())
    assert reports[0].replaced == {"torch.softmax (compiled)": 1}
    assert reports[1].replaced == {"isograd::softmax (compiled)": 1}  # it was traced before
    assert all(report.operators == {"isograd::softmax": 2} for report in reports)  # and once by its own name
    assert all(report.compiled == {"isograd::softmax": 1} for report in reports)
    assert "1 x torch.softmax (compiled)  replaced; compiled, 1 graph\n" in str(reports[0])
    assert "1 x isograd::softmax  run by compiled code\n" in str(reports[1])
    assert str(reports[1]).endswith("1 x isograd::softmax  called by its own name")
    # torch before 2.14 calls the forward of a module of its own as it is, whatever module.compile() asked for.
    compiles = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    names = ("torch.nn.functional.softmax (compiled)", "isograd::softmax (compiled)")
    for name in names if compiles else ("torch.nn.functional.softmax",) * 2:
        with igt.use() as switch:
            module(x)
        assert switch.report().replaced == {name: 1}


def test_what_is_traced_is_counted_by_graphs():
    torch._dynamo.reset()
    x = torch.randn(2, 3)

    def run(t):
        t = torch.softmax(torch.softmax(t, -1), 0)
        torch._dynamo.graph_break()  # tracing begins anew, and ends here
        return torch.mm(torch.softmax(t, -1), t.T)

    compiled = torch.compile(run, backend="eager")
    with igt.use() as switch:
        compiled(x)
        compiled(x)
    lines = {line.function: line for line in switch.report().lines}
    softmax, product = lines["torch.softmax (compiled)"], lines["torch.mm (compiled)"]
    assert (softmax.count, softmax.graphs, product.count, product.graphs) == (3, 2, 1, 1)
    assert "3 x torch.softmax (compiled)  replaced; compiled, 2 graphs" in str(switch.report())
    assert switch.report().compiled == {"isograd::softmax": 6}
    with igt.use() as other:
        compiled(x)
        torch.log_softmax(x, -1)
    assert other.report().replaced == {"torch.log_softmax": 1, "isograd::softmax (compiled)": 3}


def test_methods_in_place_are_differentiated():
    def run():
        generator = torch.Generator().manual_seed(0)
        x, v = (torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
        index = torch.tensor([1, 0, 1, 3])
        out = torch.zeros(4, 3, dtype=torch.float64).index_add_(0, index, x.square())
        out.scatter_add_(1, torch.tensor([[0, 0], [2, 1]]), v[:2, 1:])
        out.square().sum().backward()
        return x.grad, v.grad

    expected = run()
    with igt.use() as switch:
        got = run()
    assert switch.report().replaced == {"torch.Tensor.index_add_": 1, "torch.Tensor.scatter_add_": 1}
    torch.testing.assert_close(got, expected)


def test_the_switch_ends_with_its_block_and_belongs_to_its_thread():
    x = torch.randn(2, 3)
    switch = igt.use()
    seen = []
    with switch:
        worker = threading.Thread(target=lambda: seen.append(torch.softmax(x, -1)))
        worker.start()
        worker.join()
    torch.softmax(x, -1)
    assert switch.report().lines == ()
    with switch, switch:
        torch.softmax(x, -1)
    assert switch.report().replaced == {"torch.softmax": 1}
    with pytest.raises(KeyError), switch:
        raise KeyError
    with switch:
        torch.softmax(x, -1)
    assert switch.report().replaced == {"torch.softmax": 2}


def test_gradients_inside_the_switch():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with igt.use():
        assert torch.autograd.gradcheck(lambda t: torch.softmax(t, 0), (x,))
        per_row = torch.func.vmap(torch.func.grad(lambda t: t.softmax(0).square().sum()))(x.detach())
        torch.func.jvp(lambda t: t.softmax(0), (x.detach(),), (x.detach(),))
    expected = torch.func.vmap(torch.func.grad(lambda t: t.softmax(0).square().sum()))(x.detach())
    torch.testing.assert_close(per_row, expected)


class Block(torch.nn.Module):
    """A transformer block as a user writes one: attention spelled out, pre-normalisation, a two-layer network."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.project = torch.nn.Linear(width, 3 * width)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x):
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + (attention @ v).transpose(1, 2).flatten(2)
        return x + self.network(self.norms[1](x))


def train(steps=50):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(16, 32),
            "layer": torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            "block": Block(32, 4),
            "head": torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.LogSoftmax(-1)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(16, (8, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        hidden = model["block"](model["layer"](model["embed"](words)))
        loss = F.nll_loss(model["head"](hidden).flatten(0, 1), words.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_an_unmodified_transformer_trains_as_with_torch():
    theirs = train()
    with igt.use() as switch:
        ours = train()
        again = train()
    assert torch.equal(ours, again)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert ours[-1] < 0.7 * ours[0]
    report = switch.report()
    assert report.replaced == {
        "torch.nn.functional.embedding": 100,
        "torch.nn.functional.layer_norm": 400,
        "torch.nn.functional.softmax": 100,
        "torch.nn.functional.log_softmax": 100,
        "torch.nn.functional.gelu": 100,
        "torch.nn.functional.scaled_dot_product_attention": 100,
    }
    assert report.not_replaced.keys() == {
        "torch.nn.functional.linear",
        "torch.nn.functional.nll_loss",
        "torch.Tensor.matmul",
    }
    assert all("order of torch's own" in line.reason for line in report.lines if not line.replaced)
