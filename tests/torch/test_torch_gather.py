"""gather, scatter_add, index_add, index_select, take_along_dim and embedding against torch and the NumPy functions."""

import functools

import opinfo_samples as samples
import pytest
from opinfo_samples import numpy, same_bits

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch import ops_gather, ops_rows

FUNCTIONS = {
    "gather": igt.gather,
    "take_along_dim": igt.take_along_dim,
    "scatter_add": igt.scatter_add,
    "index_add": igt.index_add,
    "index_select": igt.index_select,
    "nn.functional.embedding": lambda weight, indices, **options: igt.embedding(indices, weight, **options),
}
COPIES = ("gather", "take_along_dim", "index_select", "nn.functional.embedding")


@pytest.fixture(params=sorted(FUNCTIONS))
def name(request):
    return request.param


# --- torch's samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_values_and_gradients_of_torchs_samples(name, dtype):
    found = samples.sample_inputs(name, dtype)
    assert found
    for sample in found:
        for variant in (sample, samples.spread(sample)):
            if name == "nn.functional.embedding" and (
                variant.kwargs.get("max_norm")
                or variant.kwargs.get("sparse")
                or variant.kwargs.get("scale_grad_by_freq")
            ):
                with pytest.raises(ig.UnsupportedError):
                    samples.apply(FUNCTIONS[name], variant)
                continue
            samples.check(FUNCTIONS[name], name, sample, variant, 1, exact=name in COPIES)


@pytest.mark.thorough
def test_first_and_second_derivatives_of_torchs_samples(name):
    for sample in samples.sample_inputs(name, torch.float64, 1 if name != "nn.functional.embedding" else 3):
        samples.check_derivatives(FUNCTIONS[name], sample)


def test_error_inputs(name):
    samples.check_error_inputs(FUNCTIONS[name], name)


# --- bits of the NumPy functions --------------------------------------------------------------------------------------
def problem(dtype, seed=0):
    """An x [5, 7, 6], an index [5, 9, 6] along dimension 1 with many repetitions, gradients of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 7, 6, generator=generator).to(dtype)
    index = torch.randint(7, (5, 9, 6), generator=generator) // 2
    scale = 10.0 ** torch.randint(-6, 3, (5, 9, 6), generator=generator)
    return x, index, (torch.randn(5, 9, 6, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_bits_of_the_numpy_functions(dtype, index_dtype):
    x, index, values = problem(dtype)
    index = index.to(index_dtype)
    leaf = x.clone().requires_grad_()
    v = igt.gather(leaf, 1, index)
    assert same_bits(v.detach(), ig.take_along_axis(numpy(x), numpy(index), 1))
    v.backward(values)
    expected = ig.take_along_axis_backward(numpy(values), numpy(index), (5, 7, 6), 1)
    assert same_bits(leaf.grad, expected)
    added = igt.scatter_add(x, 1, index, values)
    assert same_bits(added, ig.scatter_sum(numpy(x), numpy(index), numpy(values), 1))
    rows = index[0, :, 0]
    table = x[0].clone().requires_grad_()
    words = igt.embedding(rows, table, padding_idx=1)
    assert same_bits(words.detach(), ig.embedding(numpy(table), numpy(rows), 1))
    words.backward(values[0])
    assert same_bits(table.grad, ig.embedding_backward(numpy(values[0]), numpy(rows), 7, 1))
    assert same_bits(
        igt.index_add(x[0], 0, rows, values[0]), ig.scatter_sum(numpy(x[0]), numpy(rows), numpy(values[0]), 0)
    )


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_gradients_do_not_depend_on_the_order_of_repeated_indices(dtype):
    x, index, values = problem(dtype)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    for call in (
        lambda i, v: ops_gather.GATHER_BACKWARD(v, 1, i, x.shape),
        lambda i, v: igt.scatter_add(x, 1, i, v),
        lambda i, v: igt.index_add(x, 1, i[0, :, 0], v),
        lambda i, v: ops_rows.EMBEDDING_BACKWARD(v, i[:, :, 0], 7, 2),
    ):
        assert same_bits(call(index, values), call(index[:, order], values[:, order]))


def test_a_broadcast_input_gets_one_sum():
    # torch expands the input and sums its gradient afterwards, rounding in between.
    x = torch.zeros(1, 3, requires_grad=True)
    values = torch.tensor([[1.0, 1.0], [2.0**-24, 2.0**-24], [2.0**-24, 2.0**-24]])
    indices = torch.tensor([[0, 1], [0, 0], [1, 1]])
    igt.take_along_dim(x, indices, 1).backward(values)
    assert x.grad.tolist() == [[1 + 2.0**-23, 1 + 2.0**-23, 0]]
    x = torch.randn(4, 1, 3, 1)
    indices = torch.randint(3, (1, 5, 6, 2))
    assert torch.equal(igt.take_along_dim(x, indices, 2), torch.take_along_dim(x, indices, 2))
    assert torch.equal(igt.take_along_dim(x, indices - 3, 2), torch.take_along_dim(x, indices - 3, 2))


def test_elements_without_sources_keep_their_bits_and_nan_stays_where_it_is():
    x = torch.tensor([[-0.0, float("nan"), 1.0, 2.0]])
    out = igt.scatter_add(x, 1, torch.tensor([[3, 2, 2]]), torch.tensor([[float("inf"), float("-inf"), float("inf")]]))
    assert torch.equal(out.view(torch.int32)[:, :2], x.view(torch.int32)[:, :2])
    assert out[0, 2].isnan()
    assert out[0, 3] == float("inf")


def test_padding_rows_get_no_gradient_and_none_in_the_second_derivative():
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    words = torch.tensor([[0, 4, 4], [1, 4, 2]])
    for padding in (4, -1):
        igt.embedding(words, table, padding).sum().backward()
        assert table.grad[4].tolist() == [0, 0, 0]
        table.grad = None
    grad = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda g: ops_rows.EMBEDDING_BACKWARD(g, words, 5, 4), (grad,), check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(lambda t: igt.embedding(words, t, 4).square(), (table,))


def test_alpha():
    x, index, values = problem(torch.float32)
    for alpha in (0, -1, 2.5):
        got = igt.index_add(x, 1, index[0, :, 0], values, alpha=alpha)
        torch.testing.assert_close(got, torch.index_add(x, 1, index[0, :, 0], values, alpha=alpha))


# --- torch's machinery ------------------------------------------------------------------------------------------------
OPERATORS = [
    (ops_gather.GATHER, lambda x, i, v: (x, 1, i)),
    (ops_gather.GATHER_BACKWARD, lambda x, i, v: (v, 1, i, list(x.shape))),
    (ops_gather.SCATTER_ADD, lambda x, i, v: (x, 1, i, v)),
    (ops_rows.INDEX_SELECT, lambda x, i, v: (x, 1, i[0, :, 0])),
    (ops_rows.INDEX_SELECT_BACKWARD, lambda x, i, v: (v, 1, i[0, :, 0], list(x.shape))),
    (ops_rows.INDEX_ADD, lambda x, i, v: (x, 1, i[0, :, 0], v)),
    (ops_rows.EMBEDDING, lambda x, i, v: (x[0], i, 2)),
    (ops_rows.EMBEDDING_BACKWARD, lambda x, i, v: (v, i[:, :, 0], 7, 2)),
]


@pytest.mark.parametrize(("op", "arguments"), OPERATORS, ids=lambda v: getattr(v, "__name__", None))
def test_opcheck(op, arguments):
    x, index, values = problem(torch.float64)
    torch.library.opcheck(op.overload, arguments(x.requires_grad_(), index, values.requires_grad_()))
    torch.library.opcheck(op.overload, arguments(*problem(torch.bfloat16)))


@pytest.mark.parametrize(("op", "arguments"), OPERATORS, ids=lambda v: getattr(v, "__name__", None))
def test_meta_tensors_have_the_layout_of_real_ones(op, arguments):
    real = arguments(*problem(torch.float32))
    expected = op(*real)
    meta = op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in real])
    layout = [(t.shape, t.stride(), t.dtype) for t in (meta, expected)]
    assert layout[0] == layout[1]
    assert meta.is_meta


@pytest.mark.parametrize(("op", "arguments"), OPERATORS, ids=lambda v: getattr(v, "__name__", None))
def test_vmap_has_the_bits_of_a_loop(op, arguments):
    batches = [arguments(*problem(torch.float32, seed)) for seed in range(3)]
    positions = [i for i, a in enumerate(batches[0]) if isinstance(a, torch.Tensor)]
    for mapped in ([p] for p in positions):
        check_vmap(op, batches, mapped)
    check_vmap(op, batches, positions)


def check_vmap(op, batches, mapped):
    """The given arguments of every batch stacked along some dimension, the others those of the first."""
    members = [[b[i] if i in mapped else batches[0][i] for i in range(len(b))] for b in batches]
    stacked = [
        torch.stack([m[i] for m in members], -1) if i in mapped else members[0][i] for i in range(len(members[0]))
    ]
    in_dims = tuple(-1 if i in mapped else None for i in range(len(stacked)))
    got = torch.func.vmap(op, in_dims=in_dims)(*stacked)
    assert torch.equal(got, torch.stack([op(*m) for m in members]))


def test_vmap_over_scalars():
    x, index = torch.randn(4), torch.tensor([0])
    assert torch.equal(torch.func.vmap(lambda t: igt.gather(t, 0, index))(x), x[:, None])
    assert torch.equal(torch.func.vmap(lambda t: igt.gather(t, 0, index[0]))(x), x)
    assert torch.equal(torch.func.vmap(lambda t: igt.scatter_add(t, 0, index[0], t))(x), x + x)
    assert torch.equal(torch.func.vmap(lambda t: igt.index_select(t, 0, index))(x), x)
    assert torch.equal(torch.func.vmap(lambda t: igt.index_add(t, 0, index, t))(x), x + x)


def test_torch_func():
    x, index, values = problem(torch.float64)

    def loss(gather, scatter):
        return lambda t, v: (gather(t, 1, index).square() * values).sum() + scatter(t, 1, index, v).pow(3).sum()

    ours, theirs = loss(igt.gather, igt.scatter_add), loss(torch.gather, torch.scatter_add)
    for transform in (
        lambda f: torch.func.grad(f, (0, 1)),
        functools.partial(functools.partial, _tangent),
        lambda f: torch.func.jacfwd(torch.func.grad(lambda t, v: f(t * t[0, 0, 0], v))),
    ):
        for a, b in zip(_flat(transform(ours)(x, values)), _flat(transform(theirs)(x, values)), strict=True):
            torch.testing.assert_close(a, b)
    rows, words = x[0], index[:, :, 0]
    per_sample = torch.func.vmap(torch.func.grad(lambda t, w: igt.embedding(w, t).pow(3).sum()), in_dims=(None, 0))
    expected = torch.stack([torch.func.grad(lambda t: t[w].pow(3).sum())(rows) for w in words])  # noqa: B023
    torch.testing.assert_close(per_sample(rows, words), expected)


def _tangent(f, a, b):
    return torch.func.jvp(f, (a, b), (torch.ones_like(a), b))


def _flat(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()

    def step(x, index, values, words):
        y = igt.gather(x, 1, index) + igt.take_along_dim(x, index[:1], 1)
        y = y[:, :1] + igt.scatter_add(x, 1, index, values)
        rows = igt.index_select(x, 1, words) + igt.index_add(x, 1, words, x[:, : len(words)])[:, : len(words)]
        return y.square().sum() + igt.embedding(words, x[0], padding_idx=1).sum() + rows.square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (4, 6):
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(3, 7, size, generator=generator)
        index = torch.randint(7, (3, size + 1, size), generator=generator)
        words = torch.randint(7, (5,), generator=generator)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        values = torch.randn(index.shape, generator=generator)
        got, expected = compiled(a, index, values, words), step(b, index, values, words)
        assert torch.equal(got, expected)
        got.backward()
        expected.backward()
        assert torch.equal(a.grad, b.grad)


def test_the_rule_of_cuda_autocast():
    narrow, wider = torch.zeros(3, dtype=torch.float16), torch.ones(3)
    index = torch.arange(3)
    assert ops_gather._promoted(narrow, 0, index, wider).dtype is torch.float32
    with pytest.raises(ig.InvalidProblemError, match=r"src has dtype torch.float32 and input torch.float16"):
        igt.scatter_add(narrow, 0, index, wider)


# --- errors -----------------------------------------------------------------------------------------------------------
def test_an_index_out_of_range():
    x = torch.zeros(3, 4)
    for index in ([[0, 4]], [[0, -5]]):
        for call in (
            lambda i: igt.gather(x, 1, i),
            lambda i: igt.scatter_add(x, 1, i, torch.ones(1, 2)),
            lambda i: igt.take_along_dim(x, i, 1),
        ):
            with pytest.raises(ig.IndexOutOfRangeError, match=r"(index|indices)\[0, 1\] is"):
                call(torch.tensor(index))
    for index in ([0, 3], [0, -1]):
        for call in (
            lambda i: igt.index_select(x, 0, i),
            lambda i: igt.index_add(x, 0, i, torch.ones(2, 4)),
            lambda i: igt.embedding(i, x),
        ):
            with pytest.raises(ig.IndexOutOfRangeError, match=r"(index|input)\[1\] is"):
                call(torch.tensor(index))
    assert not x.any()


def test_arguments_that_no_operator_could_serve():
    x, index = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    for call, error, message in (
        (lambda: igt.gather([1.0], 0, index), ig.InvalidProblemError, "input is list"),
        (lambda: igt.gather(x, 2, index), ig.InvalidProblemError, "dim is 2"),
        (lambda: igt.gather(x, 0.5, index), ig.InvalidProblemError, "dim is 0.5"),
        (lambda: igt.gather(x, 0, index.float()), ig.UnsupportedError, "index has dtype torch.float32"),
        (lambda: igt.gather(x.long(), 0, index), ig.UnsupportedError, "input has dtype torch.int64"),
        (lambda: igt.gather(x, 0, index, sparse_grad=True), ig.UnsupportedError, "sparse_grad is True"),
        (lambda: igt.gather(x, 0, index.to("meta")), ig.DeviceMismatchError, "input is on cpu, index is on meta"),
        (lambda: igt.gather(torch.zeros([1] * 9), 0, torch.zeros([1] * 9).long()), ig.InvalidProblemError, "rank 9"),
        (lambda: igt.take_along_dim(x, index[0], 1), ig.InvalidProblemError, "the same rank"),
        (lambda: igt.take_along_dim(x, index[:2], 1), ig.InvalidProblemError, "along dimension 0"),
        (lambda: igt.scatter_add(x, 1, index, x[:, :1]), ig.InvalidProblemError, "no more than 1 along dimension 1"),
        (lambda: igt.index_add(x, 0, index, x), ig.InvalidProblemError, "index has shape"),
        (lambda: igt.index_add(x, 0, index[0], x), ig.InvalidProblemError, "source has shape"),
        (lambda: igt.index_select(x, 0, index), ig.InvalidProblemError, "one dimension"),
        (lambda: igt.embedding(index, x[0]), ig.InvalidProblemError, "two dimensions"),
        (lambda: igt.embedding(index, x, padding_idx=3), ig.InvalidProblemError, "padding_idx is 3"),
        (lambda: igt.embedding(index, x, max_norm=1.0), ig.UnsupportedError, "max_norm is 1.0"),
        (lambda: igt.embedding(index, x, sparse=True), ig.UnsupportedError, "sparse is True"),
        (lambda: igt.embedding(index, x, scale_grad_by_freq=True), ig.UnsupportedError, "scale_grad_by_freq is True"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_inside_an_encoder():
    x, index = torch.zeros(3), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ig.UnsupportedError, match=r"gather: .*recording"), ig.Encoder():
        igt.gather(x, 0, index)
