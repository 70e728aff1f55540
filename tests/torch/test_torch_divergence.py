"""kl_div, distillation_loss, gumbel_softmax and sparsemax against torch and the NumPy functions."""

import numpy as np
import opinfo_samples as samples
import pytest
from opinfo_samples import numpy, same_bits

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812

import isograd as ig
import isograd.torch as igt

REDUCTIONS = ("mean", "batchmean", "sum", "none")
KL = "nn.functional.kl_div"
GUMBEL_BACKWARD = torch.ops.isograd.gumbel_softmax_backward


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def work_of(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


# --- kl_div -----------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_kl_div_of_torchs_samples(dtype):
    found = samples.sample_inputs(KL, dtype)
    assert found
    for sample in found:
        for variant in (sample, samples.spread(sample)):
            samples.check(igt.kl_div, KL, sample, variant, 8)


@pytest.mark.thorough
def test_derivatives_of_kl_div_of_torchs_samples():
    for sample in samples.sample_inputs(KL, torch.float64, 3):  # every third of 16
        samples.check_derivatives(igt.kl_div, sample)


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
def test_derivatives_of_kl_div_by_both_arguments(reduction, log_target):
    x, t = randn(2, 3).requires_grad_(), randn(2, 3, seed=1).abs().add(0.1).requires_grad_()

    def loss(a, b):
        return igt.kl_div(a, b, reduction=reduction, log_target=log_target)

    assert torch.autograd.gradcheck(loss, (x, t), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, (x, t), check_fwd_over_rev=True)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
def test_bits_of_the_numpy_kl_div(dtype, reduction, log_target):
    x = igt.log_softmax(randn(4, 5), -1).to(dtype).requires_grad_()
    t = igt.softmax(randn(4, 5, seed=1), -1).to(dtype)
    t = (t.log() if log_target else t).requires_grad_()
    loss = igt.kl_div(x, t, reduction=reduction, log_target=log_target)
    expected = np.asarray(ig.kl_div(numpy(x), numpy(t), reduction, log_target))
    assert loss.dtype is dtype
    assert same_bits(loss, torch.from_numpy(expected).to(dtype))
    dloss = torch.rand(loss.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    loss.backward(dloss)
    for leaf, wrt in ((x, "input"), (t, "target")):
        work = numpy(dloss).astype(expected.dtype)
        assert same_bits(leaf.grad, ig.kl_div_backward(work, numpy(x), numpy(t), reduction, log_target, wrt))


def test_a_probability_of_zero_adds_nothing():
    x = torch.tensor([0.0, -torch.inf], requires_grad=True)
    t = torch.tensor([1.0, 0.0], requires_grad=True)
    loss = igt.kl_div(x, t, reduction="sum")
    loss.backward()
    assert loss == 0
    assert x.grad.tolist() == [-1, 0]
    assert t.grad.tolist() == [1, 0]
    assert F.kl_div(x, t, reduction="sum").isnan()


# --- distillation -----------------------------------------------------------------------------------------------------
def teacher_of(dtype, named):
    """(logits, None), or the log-probabilities of `named` classes of six with their indices."""
    logits = randn(3, 6, dtype=dtype, seed=1)
    if named is None:
        return logits, None
    values, indices = (logits.double() / 2).log_softmax(-1).topk(named)
    return values.to(dtype), indices


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
@pytest.mark.parametrize("named", [None, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bits_of_the_numpy_distillation_loss(dtype, named, reduction):
    student = randn(3, 6, dtype=dtype).requires_grad_()
    teacher, indices = teacher_of(dtype, named)
    loss = igt.distillation_loss(student, teacher, 2.0, indices, reduction)
    plain = [numpy(student), numpy(teacher), 2.0, None if indices is None else numpy(indices), reduction]
    assert same_bits(loss, ig.distillation_loss(*plain))
    dloss = torch.rand(loss.shape, generator=torch.Generator().manual_seed(2)).to(work_of(dtype))
    loss.backward(dloss)
    assert same_bits(student.grad, ig.distillation_loss_backward(numpy(dloss), *plain))


@pytest.mark.thorough
@pytest.mark.parametrize("named", [None, 1, 3, 6])
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_derivatives_of_the_distillation_loss(named, reduction):
    student = randn(3, 6)[:2].clone().requires_grad_()
    teacher, indices = teacher_of(torch.float64, named)
    teacher, indices = teacher[:2], None if indices is None else indices[:2]

    def loss(x):
        return igt.distillation_loss(x, teacher, 2.0, indices, reduction)

    assert torch.autograd.gradcheck(loss, (student,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, (student,), check_fwd_over_rev=True)


@pytest.mark.thorough
def test_distillation_is_a_divergence_of_torch():
    student, teacher = randn(3, 6), randn(3, 6, seed=1)
    expected = 4 * F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    torch.testing.assert_close(igt.distillation_loss(student, teacher, 2.0), expected)


# --- the simplex ------------------------------------------------------------------------------------------------------
def test_the_meaning_of_torchs_gumbel_softmax():
    # torch has no samples for it and draws its own noise: shapes, dtypes, sums and the distribution can be compared.
    logits = torch.tensor([1.0, 0.0, -1.0]).expand(4000, 3)
    for hard in (False, True):
        got, theirs = igt.gumbel_softmax(logits, 0.5, hard, seed=1), F.gumbel_softmax(logits, 0.5, hard)
        assert (got.shape, got.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(got.sum(-1), torch.ones(4000))
        torch.testing.assert_close(got.mean(0), theirs.mean(0), atol=0.06, rtol=0)
        assert not hard or set(got.unique().tolist()) == {0.0, 1.0}
    picked = igt.gumbel_softmax(logits, 1.0, True, seed=2).mean(0)
    torch.testing.assert_close(picked, logits[0].softmax(0), atol=0.04, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [0, 1])
def test_derivatives_on_the_simplex(dim):
    x = randn(3, 4).requires_grad_()
    soft = igt.gumbel_softmax(x, 0.7, False, dim, seed=3)
    dy = randn(3, 4, seed=1).requires_grad_()
    for function, inputs in (
        (lambda t: igt.gumbel_softmax(t, 0.7, False, dim, seed=3), (x,)),
        (lambda g, y: GUMBEL_BACKWARD(g, y, dim, 0.7), (dy, soft.detach().requires_grad_())),
        (lambda t: igt.sparsemax(t, dim), (x,)),
    ):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)
    # A hard sample has the derivatives of the soft one.
    (hard,), (expected,) = (
        torch.autograd.grad(igt.gumbel_softmax(x, 0.7, h, dim, seed=3), x, dy, create_graph=True) for h in (True, False)
    )
    assert torch.equal(hard, expected)
    (hard,), (expected,) = (torch.autograd.grad(g.square().sum(), x) for g in (hard, expected))
    torch.testing.assert_close(hard, expected)


# --- torch's machinery ------------------------------------------------------------------------------------------------
def operators(dtype, seed=0):
    """Every operator with arguments, those of floating point requiring gradients."""
    x, t = (randn(3, 6, dtype=dtype, seed=seed + i).abs().add(0.1).requires_grad_() for i in range(2))
    values, indices = teacher_of(dtype, 2)
    dloss = torch.tensor(0.5, dtype=work_of(dtype), requires_grad=True)
    return {
        torch.ops.isograd.distillation_loss.default: (x, values, indices, 2.0),
        torch.ops.isograd.distillation_loss_backward.default: (dloss, x, t.detach(), None, 2.0, "mean"),
    }


OPERATORS = list(operators(torch.float32))


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_opcheck(op):
    torch.library.opcheck(op, operators(torch.float32)[op])
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16)[op]]
    torch.library.opcheck(op, tuple(plain))


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_meta_tensors_have_the_layout_of_real_ones(op):
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.bfloat16)[op]]
    real, meta = op(*plain), op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in plain])
    assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)
    assert meta.is_meta


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_vmap_has_the_bits_of_a_loop(op):
    batches = [
        [a.detach() if isinstance(a, torch.Tensor) else a for a in operators(torch.float32, seed)[op]]
        for seed in range(3)
    ]
    mapped = [i for i, a in enumerate(batches[0]) if isinstance(a, torch.Tensor) and a.dim()]
    stacked = [torch.stack([b[i] for b in batches], -1) if i in mapped else a for i, a in enumerate(batches[0])]
    got = torch.func.vmap(op, in_dims=tuple(-1 if i in mapped else None for i in range(len(stacked))))(*stacked)
    assert torch.equal(got, torch.stack([op(*b) for b in batches]))


@pytest.mark.thorough
def test_vmap_where_nothing_is_reduced():
    x, t = randn(4, 3, 2), randn(4, 3, 2, seed=1).abs()
    got = torch.func.vmap(lambda a, b: igt.kl_div(a, b, reduction="none"), in_dims=(0, 0))(x, t)
    assert torch.equal(got, igt.kl_div(x, t, reduction="none"))
    got = torch.func.vmap(torch.func.grad(lambda a, b: igt.kl_div(a, b, reduction="none").sum()))(x, t)
    assert torch.equal(got, -t)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()

    def step(x, t):
        y = igt.gumbel_softmax(x, 0.5, True, seed=3) + igt.sparsemax(x, 0)
        loss = igt.kl_div(igt.log_softmax(x, -1), t, reduction="batchmean") + igt.KLDivLoss(reduction="sum")(x, t)
        values, indices = igt.topk(t.log(), 2)
        return (y * t).sum() + loss + igt.distillation_loss(x, t) + igt.distillation_loss(x, values, 1.0, indices)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, classes in ((3, 4), (5, 7)):
        t = torch.softmax(randn(rows, classes, dtype=torch.float32), -1)
        a, b = (randn(rows, classes, dtype=torch.float32, seed=1).requires_grad_() for _ in range(2))
        got, expected = compiled(a, t), step(b, t)
        assert torch.equal(got, expected)
        got.backward()
        expected.backward()
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_cpu_autocast_gives_the_types_of_torch(dtype):
    x, t = randn(3, 4, dtype=dtype), randn(3, 4, dtype=dtype, seed=1).abs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = igt.kl_div(x, t, reduction="sum"), F.kl_div(x, t, reduction="sum")
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


# --- errors -----------------------------------------------------------------------------------------------------------
def test_arguments_that_no_operator_could_serve():
    x, t = randn(3, 4, dtype=torch.float32), randn(3, 4, dtype=torch.float32, seed=1).abs()
    index = torch.tensor([[0, 4]] * 3)
    for call, error, message in (
        (lambda: igt.kl_div(x, t[:1]), ig.InvalidProblemError, "target has shape"),
        (lambda: igt.kl_div(x, t.double()), ig.InvalidProblemError, "target has dtype torch.float64"),
        (lambda: igt.kl_div(x, t.to("meta")), ig.DeviceMismatchError, "target is on meta"),
        (lambda: igt.kl_div(x.long(), t), ig.UnsupportedError, "input has dtype torch.int64"),
        (lambda: igt.kl_div(x, t, reduction="max"), ig.InvalidProblemError, "reduction is 'max'"),
        (lambda: igt.kl_div(x, t, reduction=None), ig.InvalidProblemError, "reduction is None"),
        (lambda: igt.kl_div(x, t, reduce=False, size_average=True), ig.UnsupportedError, "size_average is True"),
        (lambda: igt.distillation_loss(x, t[:, :2]), ig.InvalidProblemError, "teacher has shape"),
        (lambda: igt.distillation_loss(x, t, reduction=None), ig.InvalidProblemError, "reduction is None"),
        (lambda: igt.distillation_loss(x, t, 0.0), ig.InvalidProblemError, "temperature is 0.0"),
        (lambda: igt.distillation_loss(x, t.double()), ig.InvalidProblemError, "teacher has dtype float64"),
        (lambda: igt.distillation_loss(x, -t[:, :2], 1.0, index), ig.IndexOutOfRangeError, r"indices\[0, 1\] is 4"),
        (lambda: igt.distillation_loss(x, t.requires_grad_()), ig.UnsupportedError, "teacher requires a gradient"),
        (lambda: igt.gumbel_softmax(x, 0.0, seed=1), ig.InvalidProblemError, "tau is 0.0"),
        (lambda: igt.gumbel_softmax(x, seed=-1), ig.InvalidProblemError, "seed is -1"),
        (lambda: igt.gumbel_softmax(x), TypeError, "seed"),
        (lambda: igt.sparsemax(x, 2), ig.InvalidProblemError, "dim is 2"),
        (lambda: igt.sparsemax(x.long()), ig.UnsupportedError, "input has dtype torch.int64"),
    ):
        with pytest.raises(error, match=message):
            call()
