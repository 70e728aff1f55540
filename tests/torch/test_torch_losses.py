"""cross_entropy and linear_cross_entropy against torch and the NumPy functions."""

import numpy as np
import opinfo_samples as samples
import pytest
from opinfo_samples import numpy, same_bits

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812

import isograd as ig
import isograd.torch as igt
from isograd.torch import ops_cross_entropy, ops_linear_cross_entropy

NAME = "nn.functional.cross_entropy"
OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.01},
    {"label_smoothing": 0.2, "z_loss": 0.1, "weight": True},
    {"count": 7.0, "weight": True},
]


def problem(dtype, probabilities=False, seed=0):
    """Logits [4, 5, 3] with classes along dimension 1, targets of which one is ignored, weights of the classes."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, 5, 3, generator=generator) * 2).to(dtype)
    weight = torch.rand(5, generator=generator).to(dtype)
    if probabilities:
        return logits, torch.softmax(torch.randn(4, 5, 3, generator=generator), 1).to(dtype), weight
    targets = torch.randint(5, (4, 3), generator=generator)
    targets[1, 1] = -100
    return logits, targets, weight


def arguments(options, weight):
    return {k: v for k, v in options.items() if k != "weight"} | ({"weight": weight} if "weight" in options else {})


# --- torch's samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_values_and_gradients_of_torchs_samples(dtype):
    found = samples.sample_inputs(NAME, dtype)
    assert found
    for sample in found:
        for variant in (sample, samples.spread(sample)):
            samples.check(igt.cross_entropy, NAME, sample, variant, 4)


@pytest.mark.thorough
def test_first_and_second_derivatives_of_torchs_samples():
    for sample in samples.sample_inputs(NAME, torch.float64, 3):  # every third of 21
        samples.check_derivatives(igt.cross_entropy, sample)


@pytest.mark.thorough
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_with_every_option(options, probabilities):
    logits, targets, weight = problem(torch.float64, probabilities)
    logits, targets = logits[:2, :, :2].clone().requires_grad_(), targets[:2, ..., :2].clone()
    given = arguments(options, weight)
    inputs = [logits]
    if probabilities:
        inputs.append(targets.requires_grad_())

    def loss(x, t=targets):
        return igt.cross_entropy(x, t, **given)

    assert torch.autograd.gradcheck(loss, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, inputs, check_fwd_over_rev=True)


# --- bits of the NumPy functions --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_the_numpy_functions(dtype, options, probabilities):
    logits, targets, weight = problem(dtype, probabilities)
    logits.requires_grad_()
    given = arguments(options, weight)
    loss = igt.cross_entropy(logits, targets, **given)
    plain = {k: numpy(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    expected = ig.cross_entropy(numpy(logits), numpy(targets), **plain)
    assert loss.dtype is dtype
    assert same_bits(loss, torch.from_numpy(np.asarray(expected)).to(dtype))
    dloss = torch.rand(loss.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    loss.backward(dloss)
    work = numpy(dloss).astype(expected.dtype)
    assert same_bits(logits.grad, ig.cross_entropy_backward(work, numpy(logits), numpy(targets), **plain))


def test_the_loss_does_not_depend_on_the_order_of_rows_or_on_other_rows():
    logits, targets, _ = problem(torch.float32)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(igt.cross_entropy(logits, targets), igt.cross_entropy(logits[order], targets[order]))
    whole, part = (logits.clone().requires_grad_() for _ in range(2))
    igt.cross_entropy(whole, targets, count=11).backward()
    igt.cross_entropy(part[:2], targets[:2], count=11).backward()
    assert torch.equal(whole.grad[:2], part.grad[:2])


def test_a_batch_without_targets_is_nan_as_in_torch():
    logits = torch.randn(2, 3, requires_grad=True)
    targets = torch.full((2,), -100)
    assert igt.cross_entropy(logits, targets).isnan()
    igt.cross_entropy(logits, targets, reduction="sum").backward()
    assert not logits.grad.any()
    assert igt.cross_entropy(torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)).isnan()


def test_the_module():
    logits, targets, weight = problem(torch.float32)
    module = igt.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.5, ignore_index=2, reduction="sum")
    targets = targets.where(targets >= 0, 2)
    expected = igt.cross_entropy(logits, targets, weight, None, 2, None, "sum", 0.1, z_loss=0.5)
    assert torch.equal(module(logits, targets), expected)
    assert isinstance(module, torch.nn.CrossEntropyLoss)
    torch.testing.assert_close(igt.CrossEntropyLoss()(logits, targets), torch.nn.CrossEntropyLoss()(logits, targets))


# --- linear_cross_entropy ---------------------------------------------------------------------------------------------
LINEAR_OPTIONS = [{}, {"reduction": "sum", "z_loss": 0.01}, {"reduction": "none"}, {"label_smoothing": 0.1, "chunk": 2}]


def linear_problem(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((2, 3, 6), (5, 6), (5,)))
    targets = torch.randint(5, (2, 3), generator=generator)
    targets[0, 1] = -100
    return hidden, weight, targets, bias


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("options", LINEAR_OPTIONS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_bits_of_linear_cross_entropy(dtype, options, biased):
    hidden, weight, targets, bias = linear_problem(dtype)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, *((bias,) if biased else ()))]
    loss = igt.linear_cross_entropy(*leaves[:2], targets, *leaves[2:], **options)
    plain = [numpy(t) for t in (hidden, weight, targets, *((bias,) if biased else ()))]
    expected, *_ = ig.linear_cross_entropy(*plain, **options, return_gradient=True)
    assert same_bits(loss, expected)
    with torch.no_grad():
        assert same_bits(igt.linear_cross_entropy(*leaves[:2], targets, *leaves[2:], **options), expected)
    dloss = torch.full(loss.shape, 2.0, dtype=loss.dtype)  # a power of two: scaling is exact
    loss.backward(dloss)
    _, *gradients = ig.linear_cross_entropy(*plain, **options, return_gradient=True, dloss=numpy(dloss))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert same_bits(leaf.grad, gradient)


@pytest.mark.thorough
def test_linear_cross_entropy_is_the_loss_of_the_logits():
    hidden, weight, targets, bias = (t.requires_grad_(t.is_floating_point()) for t in linear_problem(torch.float64))
    loss = igt.linear_cross_entropy(hidden, weight, targets, bias, class_weight=torch.arange(1.0, 6).double())
    logits = F.linear(hidden, weight, bias).movedim(-1, 1)
    expected = F.cross_entropy(logits, targets, torch.arange(1.0, 6).double())
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, (hidden, weight, bias)),
        torch.autograd.grad(3 * expected, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_linear_cross_entropy_has_no_second_derivative_and_says_so():
    hidden, weight, targets, _ = linear_problem(torch.float64)
    for reduction in ("mean", "none"):
        leaf = hidden.clone().requires_grad_()
        loss = igt.linear_cross_entropy(leaf, weight, targets, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
        with pytest.raises(ig.UnsupportedError, match="second derivatives"):
            gradient.sum().backward()
    with pytest.raises(ig.UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda t: igt.linear_cross_entropy(t, weight, targets), (hidden,), (hidden,))


# --- torch's machinery ------------------------------------------------------------------------------------------------
def operators(dtype, probabilities=False):
    """Every operator with arguments, those of floating point requiring gradients."""
    logits, targets, weight = problem(dtype, probabilities)
    logits.requires_grad_()
    state = ops_cross_entropy.CROSS_ENTROPY(logits.detach(), targets, weight)[1]
    work = torch.float64 if dtype is torch.float64 else torch.float32
    dloss = torch.tensor(0.5, dtype=work, requires_grad=True)
    rest = (1, -100, 0.1, 0.01, "mean", None)
    hidden, matrix, words, bias = (t.requires_grad_(t.is_floating_point()) for t in linear_problem(dtype))
    return {
        ops_cross_entropy.CROSS_ENTROPY: (logits, targets, weight, *rest),
        ops_cross_entropy.CROSS_ENTROPY_BACKWARD: (dloss, logits, targets, weight, state, *rest),
        ops_linear_cross_entropy.LINEAR_CROSS_ENTROPY: (hidden, matrix, words, bias, None, *rest[1:], 2, None, False),
    }


each_operator = pytest.mark.parametrize(
    "op",
    [
        ops_cross_entropy.CROSS_ENTROPY,
        ops_cross_entropy.CROSS_ENTROPY_BACKWARD,
        ops_linear_cross_entropy.LINEAR_CROSS_ENTROPY,
    ],
    ids=lambda op: op.__name__,
)


@each_operator
def test_opcheck(op):
    torch.library.opcheck(op.overload, operators(torch.float32)[op])
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16, True)[op]]
    torch.library.opcheck(op.overload, tuple(plain))


@each_operator
def test_meta_tensors_have_the_layout_of_real_ones(op):
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16)[op]]
    real, meta = op(*plain), op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in plain])
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (real, meta)), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.thorough
def test_vmap_and_torch_func():
    logits, targets, weight = problem(torch.float64)

    def loss(x, t):
        return igt.cross_entropy(x.T, t, weight, label_smoothing=0.1, z_loss=0.1)

    def theirs(x, t):
        extra = x.T.logsumexp(1).square().where(t >= 0, 0).sum() / weight[t.clamp(0)].where(t >= 0, 0).sum()
        return F.cross_entropy(x.T, t, weight, label_smoothing=0.1) + 0.1 * extra

    each = torch.func.vmap(torch.func.grad(loss))(logits, targets)
    assert torch.equal(each, torch.stack([torch.func.grad(loss)(x, t) for x, t in zip(logits, targets, strict=True)]))
    torch.testing.assert_close(each, torch.func.vmap(torch.func.grad(theirs))(logits, targets))
    hessian = torch.func.hessian(loss)(logits[0], targets[0])
    torch.testing.assert_close(hessian, torch.func.hessian(theirs)(logits[0], targets[0]))
    hidden, matrix, words, _ = linear_problem(torch.float64)
    gradients = torch.func.vmap(torch.func.grad(lambda h, t: igt.linear_cross_entropy(h, matrix, t)))(hidden, words)
    expected = torch.func.grad(
        lambda h: sum(igt.linear_cross_entropy(a, matrix, t) for a, t in zip(h, words, strict=True))
    )(hidden)
    assert torch.equal(gradients, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()

    def step(x, targets, hidden, matrix):
        loss = igt.cross_entropy(x, targets, label_smoothing=0.1, z_loss=0.1) + igt.CrossEntropyLoss()(x, targets)
        return loss + igt.linear_cross_entropy(hidden, matrix, targets)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, classes in ((3, 4), (5, 7)):
        generator = torch.Generator().manual_seed(rows)
        tensors = [torch.randn(s, generator=generator) for s in ((rows, classes), (rows, 6), (classes, 6))]
        targets = torch.randint(classes, (rows,), generator=generator)
        leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
        got, expected = (f(a, targets, b, c) for f, (a, b, c) in zip((compiled, step), leaves, strict=True))
        assert torch.equal(got, expected)
        got.backward()
        expected.backward()
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
def test_cpu_autocast_gives_the_types_of_torch(dtype, probabilities):
    logits, targets, weight = problem(dtype, probabilities)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = igt.cross_entropy(logits, targets, weight), F.cross_entropy(logits, targets, weight)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


# --- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arguments_that_no_operator_could_serve():
    logits, targets, weight = problem(torch.float32)
    wrong = targets.clone()
    wrong[2, 1] = 5
    hidden, matrix, words, bias = linear_problem(torch.float32)
    nested = torch.nested.nested_tensor([logits[0]])
    for call, error, message in (
        (lambda: igt.cross_entropy(logits, wrong), ig.IndexOutOfRangeError, r"targets\[2, 1\] is 5"),
        (lambda: igt.cross_entropy(logits, -wrong), ig.IndexOutOfRangeError, "targets"),
        (lambda: igt.cross_entropy(logits, targets[:, :2]), ig.InvalidProblemError, "targets have shape"),
        (lambda: igt.cross_entropy(logits, logits.double()), ig.InvalidProblemError, "targets has dtype torch.float64"),
        (lambda: igt.cross_entropy(logits, targets, weight[1:]), ig.InvalidProblemError, "weight has shape"),
        (lambda: igt.cross_entropy(logits, targets.to("meta")), ig.DeviceMismatchError, "targets is on meta"),
        (lambda: igt.cross_entropy(logits, logits.to_sparse()), ig.UnsupportedError, "target is a tensor of layout"),
        (lambda: igt.cross_entropy(logits, nested), ig.UnsupportedError, "target is a nested tensor"),
        (lambda: igt.cross_entropy(logits.long(), targets), ig.UnsupportedError, "input has dtype torch.int64"),
        (lambda: igt.cross_entropy(logits[0, 0, 0], targets[0, 0]), ig.InvalidProblemError, "at least one dimension"),
        (lambda: igt.cross_entropy(logits, targets, reduction="max"), ig.InvalidProblemError, "reduction is 'max'"),
        (lambda: igt.cross_entropy(logits, targets, reduction=None), ig.InvalidProblemError, "reduction is None"),
        (lambda: igt.cross_entropy(logits, targets, label_smoothing=2), ig.InvalidProblemError, "label_smoothing is 2"),
        (lambda: igt.cross_entropy(logits, targets, size_average=True), ig.UnsupportedError, "size_average is True"),
        (lambda: igt.cross_entropy(logits, targets, weight.requires_grad_()), ig.UnsupportedError, "weight requires"),
        (lambda: igt.linear_cross_entropy(hidden, matrix.T, words), ig.InvalidProblemError, "weight has shape"),
        (lambda: igt.linear_cross_entropy(hidden, matrix, words[0]), ig.InvalidProblemError, "targets have shape"),
        (lambda: igt.linear_cross_entropy(hidden, matrix, words, bias[1:]), ig.InvalidProblemError, "bias has shape"),
        (lambda: igt.linear_cross_entropy(hidden, matrix.double(), words), ig.InvalidProblemError, "weight has dtype"),
        (lambda: igt.linear_cross_entropy(hidden, matrix, words, reduction=0), ig.InvalidProblemError, "reduction"),
        (lambda: igt.linear_cross_entropy(hidden, matrix, words, chunk=0), ig.InvalidProblemError, "chunk is 0"),
        (lambda: igt.linear_cross_entropy(hidden, matrix, words + 5), ig.IndexOutOfRangeError, "targets"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert samples.check_error_inputs(igt.cross_entropy, NAME) == 0  # torch lists none today


# --- counts in tensors ------------------------------------------------------------------------------------------------
COUNTS = [torch.tensor(7), torch.tensor(7, dtype=torch.int32), torch.tensor(7.0), torch.tensor(7, dtype=torch.bfloat16)]


@pytest.mark.parametrize("count", COUNTS, ids=lambda t: str(t.dtype))
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_a_count_in_a_tensor_has_the_bits_of_the_number(dtype, count):
    logits, targets, weight = problem(dtype)
    hidden, matrix, words, bias = linear_problem(dtype)

    def results(count):
        leaves = [t.clone().requires_grad_() for t in (logits, hidden, matrix, bias)]
        losses = (
            igt.cross_entropy(leaves[0], targets, weight, count=count),
            igt.linear_cross_entropy(*leaves[1:3], words, leaves[3], count=count),
        )
        gradients = torch.autograd.grad(losses, leaves, [torch.full_like(loss, 0.7) for loss in losses])
        return *losses, *gradients

    for got, expected in zip(results(count), results(7), strict=True):
        assert same_bits(got, expected)
    plain = [numpy(t) for t in (logits, targets)]
    assert ig.cross_entropy(*plain, count=np.array(7)) == ig.cross_entropy(*plain, count=7)
    assert torch.equal(ig.cross_entropy(logits, targets, count=count), ig.cross_entropy(logits, targets, count=7))


@pytest.mark.parametrize("probabilities", [False, True])
def test_second_derivatives_and_forward_mode_with_a_count_in_a_tensor(probabilities):
    logits, targets, weight = problem(torch.float64, probabilities)
    logits, targets = logits[:2, :, :2].clone().requires_grad_(), targets[:2, ..., :2].clone()

    def loss(x):
        return igt.cross_entropy(x, targets, weight, count=torch.tensor(5))

    assert torch.autograd.gradcheck(loss, (logits,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (logits,))


@pytest.mark.thorough
def test_a_count_in_a_tensor_is_an_input_of_the_compiled_graph():
    torch._dynamo.reset()
    logits, targets, _ = problem(torch.float32)
    hidden, matrix, words, _ = linear_problem(torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(x, h, count):
        return igt.cross_entropy(x, targets, count=count) + igt.linear_cross_entropy(h, matrix, words, count=count)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for number in range(3, 11):
        count = torch.tensor(number)
        leaves = [[t.clone().requires_grad_() for t in (logits, hidden)] for _ in range(2)]
        losses = [f(*both, count) for f, both in zip((compiled, step), leaves, strict=True)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a.grad, b.grad)
    assert len(graphs) == 1


def test_a_count_that_is_no_number():
    logits, targets, _ = problem(torch.float32)
    hidden, matrix, words, _ = linear_problem(torch.float32)
    for call in (
        lambda count: igt.cross_entropy(logits, targets, count=count),
        lambda count: igt.linear_cross_entropy(hidden, matrix, words, count=count),
        lambda count: ig.cross_entropy(logits, targets, count=count),
        lambda count: ig.linear_cross_entropy(hidden, matrix, words, count=count),
    ):
        for count in (torch.tensor([7]), torch.tensor(True), torch.tensor(7j), "7", True, 0, 0.0, -0.0):
            with pytest.raises(ig.InvalidProblemError, match="cross_entropy: count"):
                call(count)
        with pytest.raises(ig.DeviceMismatchError, match="cross_entropy: count is on meta"):
            call(torch.tensor(7, device="meta"))
    with pytest.raises(ig.InvalidProblemError, match=r"count has shape .* and requires a gradient"):
        igt.cross_entropy(logits, targets, count=torch.tensor(7.0, requires_grad=True))


# --- float16, and autocast --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [2048, pytest.param(65536, marks=pytest.mark.thorough)])
def test_a_scaled_loss_of_halves_has_the_gradients_of_losses_of_rows(tokens):
    generator = torch.Generator().manual_seed(4)
    hidden, matrix = torch.randn(tokens, 64, generator=generator), torch.randn(1000, 64, generator=generator) / 8
    targets = torch.randint(1000, (tokens,), generator=generator)
    leaves = [t.half().requires_grad_() for t in (hidden, matrix)]
    scale = 32768.0 * tokens / 65536 / 16
    got = torch.autograd.grad(igt.linear_cross_entropy(*leaves, targets) * scale, leaves)
    rows = igt.linear_cross_entropy(*leaves, targets, reduction="none")
    for a, b in zip(got, torch.autograd.grad(rows, leaves, torch.full_like(rows, scale / tokens)), strict=True):
        assert same_bits(a, b)
    exact = [t.detach().float().requires_grad_() for t in leaves]
    wide = F.cross_entropy(exact[0] @ exact[1].T, targets) * scale
    for a, b in zip(got, torch.autograd.grad(wide, exact), strict=True):
        assert (a - b).norm() < 5e-4 * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "float32"), ("float16", "bfloat16")], ids=str)
def test_linear_cross_entropy_under_autocast_is_linear_and_cross_entropy(kinds, dtype):
    hidden, matrix, words, bias = linear_problem(torch.float32)
    dtypes = [getattr(torch, kind) for kind in (*kinds, kinds[1])]
    leaves = [t.to(kind).requires_grad_() for t, kind in zip((hidden, matrix, bias), dtypes, strict=True)]
    class_weight = torch.rand(5, generator=torch.Generator().manual_seed(5))
    with torch.autocast("cpu", dtype=dtype):
        loss = igt.linear_cross_entropy(*leaves[:2], words, leaves[2], class_weight=class_weight)
        logits = F.linear(*leaves)
        theirs = F.cross_entropy(logits.movedim(-1, 1), words, class_weight)
    assert loss.dtype is theirs.dtype is torch.float32
    narrow = [t.detach().to(dtype) for t in leaves]
    assert torch.equal(loss, igt.linear_cross_entropy(*narrow[:2], words, narrow[2], class_weight=class_weight))
    ours, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
