"""GradientSum in one process: bits of the reference for every kind of parameter and pass, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import isograd.torch as igt  # noqa: E402
from isograd.core import arrays  # noqa: E402
from isograd.errors import InvalidProblemError, StepError, UnsupportedError  # noqa: E402
from isograd.torch.distributed import buckets, reference  # noqa: E402

GradientSum = igt.distributed.GradientSum
Backward = Callable[[nn.Module, int], None]


def check(make: Callable[[], nn.Module], backward: Backward, units: int = 3, quantum: int = -48, **given: Any) -> Any:
    """Compare the gradients of some units with the reference; returns the sum and the model."""
    torch.manual_seed(0)
    model = make()
    each = []
    for i in range(units):
        backward(model, i)
        each.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    total = GradientSum(model, quantum=quantum, **given)
    for i in range(units):
        backward(model, i)
        assert all(p.grad is None for p in model.parameters())
    report = total.finish()
    assert (report.units, report.fits) == (units, True)
    for i, (name, p) in enumerate(model.named_parameters()):
        if not p.requires_grad:
            continue
        right = reference.gradient_sum([arrays.numpy_view(e[i].contiguous()) for e in each], quantum)
        assert p.grad.dtype is p.dtype
        assert arrays.numpy_view(p.grad.contiguous()).tobytes() == right.tobytes(), name
    return total, model


def inputs(i: int, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i)).to(dtype)


def mlp(dtype: Any = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 70), nn.GELU(), nn.LayerNorm(70), nn.Linear(70, 3)).to(dtype)


def squared(model: nn.Module, i: int) -> None:
    model(inputs(i, 4, 5, dtype=model[0].weight.dtype)).square().mean().backward()


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 26])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_of_the_reference(dtype: Any, bucket_bytes: int) -> None:
    check(lambda: mlp(dtype), squared, bucket_bytes=bucket_bytes)
    check(lambda: mlp(dtype), squared, bucket_bytes=bucket_bytes, quantum=-24)


def test_dtypes_in_one_model_and_strides() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.randn(7, 8).t())
            self.brain = nn.Linear(7, 5, dtype=torch.bfloat16)
            self.wide = nn.Linear(5, 2, dtype=torch.float64)
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.number = nn.Parameter(torch.tensor(2.0))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def backward(model: Any, i: int) -> None:
        x = model.convolution(inputs(i, 2, 3, 5, 5)).mean((2, 3)) * model.number
        model.wide(model.brain((x @ model.transposed).bfloat16()).double()).square().sum().backward()

    _, model = check(Mixed, backward)
    assert model.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model.frozen.grad is None
    assert model.empty.grad.shape == (0, 3)


def test_tied_parameters_are_rounded_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

    check(Tied, lambda model, i: model.head(model.embedding(torch.tensor([i, 3, 3]))).square().sum().backward())


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of the checkpoint inside
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_pass_with_checkpoints_is_one_unit(reentrant: bool) -> None:
    """Also where every parameter is in a checkpoint, and checkpoints in checkpoints."""

    def backward(model: nn.Module, i: int) -> None:
        x = inputs(i, 4, 5).requires_grad_()

        def inner(y: Any) -> Any:
            return checkpoint(model[1:], model[0](y), use_reentrant=reentrant)

        y = checkpoint(inner, x, use_reentrant=reentrant)
        checkpoint(torch.tanh, y, use_reentrant=reentrant).sum().backward()

    check(mlp, backward)


def test_parameters_without_a_gradient_add_zero() -> None:
    def backward(model: nn.Module, i: int) -> None:
        if i == 1:
            squared(model, i)
        else:
            model[0](inputs(i, 4, 5)).sum().backward()

    check(mlp, backward)
    _, model = check(mlp, lambda model, i: model[0](inputs(i, 4, 5)).sum().backward())
    assert model[3].weight.grad.eq(0).all()


def test_units_have_no_order() -> None:
    found = []
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        torch.manual_seed(0)
        model = mlp()
        total = GradientSum(model)
        for i in order:
            squared(model, i)
        total.finish()
        found.append([p.grad.numpy().tobytes() for p in model.parameters()])
    assert found[0] == found[1]


def test_torchs_gradients_depend_on_the_order() -> None:
    found = []
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        torch.manual_seed(0)
        model = mlp()
        for i in order:
            squared(model, i)
        found.append([p.grad.numpy().tobytes() for p in model.parameters()])
    assert found[0] != found[1]


def test_settings_by_name_and_pattern() -> None:
    model = mlp()
    given = {"0.weight": -40, "0.*": -44, "3.*": -50}
    total = GradientSum(model, quantum=given, range={"3.bias": 5, "2.*": 20})
    state = total.state_dict()
    assert state["quantum"] == {
        "0.weight": -40, "0.bias": -44, "2.weight": -42, "2.bias": -42, "3.weight": -50, "3.bias": -50,
    }  # fmt: skip
    assert state["range"] == {"0.weight": 22, "0.bias": 18, "2.weight": 20, "2.bias": 20, "3.weight": 12, "3.bias": 5}
    other = GradientSum(mlp())
    other.load_state_dict(state)
    assert other.state_dict() == state
    for i in range(2):
        squared(model, i)
    total.finish()
    torch.testing.assert_close(model[0].weight.grad.isfinite().all(), torch.tensor(True))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"quantum": "a"}, InvalidProblemError, "quantum is 'a'"),
        ({"quantum": {"0.weight": 0.5}}, InvalidProblemError, "quantum holds 0.5"),
        ({"quantum": {"nowhere": -48}}, InvalidProblemError, "'nowhere', which no parameter matches"),
        ({"quantum": -101}, InvalidProblemError, "2^-101; accepted exponents: -100 to 60"),
        ({"quantum": -48, "range": 15}, InvalidProblemError, "accepted exponents: -47 to 14"),
        ({"range": {"*": True}}, InvalidProblemError, "range holds True"),
        ({"units": -1}, InvalidProblemError, "units is -1"),
        ({"units": 1.5}, InvalidProblemError, "units is 1.5"),
        ({"bucket_bytes": 0}, InvalidProblemError, "bucket_bytes is 0"),
        ({"group": 3}, InvalidProblemError, "group is 3"),
    ],
)
def test_arguments_that_are_refused(given: Any, error: type[Exception], said: str) -> None:
    model = mlp()
    with pytest.raises(error, match=r"^GradientSum: ") as found:
        GradientSum(model, **given)
    assert said in str(found.value)
    GradientSum(model)  # nothing was left on the model


def test_models_that_are_refused() -> None:
    for model, error, said in (
        (3, InvalidProblemError, "model is a int"),
        (nn.ReLU(), InvalidProblemError, "no parameters that require gradients"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), UnsupportedError, "dtype torch.complex64"),
        (mlp().to("meta"), UnsupportedError, "is on meta"),
    ):
        with pytest.raises(error) as found:
            GradientSum(model)
        assert said in str(found.value)
    model = mlp()
    squared(model, 0)
    with pytest.raises(InvalidProblemError, match=r"'0\.weight' has a gradient already"):
        GradientSum(model)
    model.zero_grad()
    total = GradientSum(model)
    with pytest.raises(InvalidProblemError, match="belongs to another GradientSum"):
        GradientSum(model)
    total.remove()
    squared(model, 0)
    assert model[0].weight.grad is not None
    model.zero_grad()
    GradientSum(model)


def test_sparse_and_other_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    total = GradientSum(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StepError, match=r"GradientSum\.finish: the gradient of 'weight' is sparse"):
        total.finish()


def test_a_step_that_cannot_be_finished() -> None:
    model = mlp()
    total = GradientSum(model)
    with pytest.raises(StepError, match="no backward pass since the last step"):
        total.finish()
    squared(model, 0)
    total.finish()
    with pytest.raises(StepError, match="no backward pass since the last step"):
        total.finish()
    squared(model, 0)  # without zero_grad
    with pytest.raises(StepError, match="zero_grad"):
        total.finish()
    squared(model, 0)
    for method in (total.state_dict, total.remove, lambda: total.load_state_dict({})):
        with pytest.raises(StepError, match="1 units of a step"):
            method()
    total.reset()
    with pytest.raises(StepError, match="no backward pass"):
        total.finish()
    with pytest.raises(InvalidProblemError, match="no result of state_dict"):
        total.load_state_dict({"quantum": {}})


def test_gradients_outside_the_range_are_nan_and_said() -> None:
    model = mlp()
    total = GradientSum(model, range={"3.bias": -20})
    squared(model, 0)
    with pytest.warns(RuntimeWarning, match=r"in 1 units, gradients of '3\.bias' were not finite or too large") as told:
        report = total.finish()
    assert told[0].filename == __file__
    assert report.exceeded == ("3.bias",)
    assert "'3.bias'" in repr(report)
    assert all(p.grad.isnan().all() for p in model.parameters())
    model.zero_grad()
    total.load_state_dict(GradientSum(mlp()).state_dict())
    squared(model, 0)
    assert total.finish().fits


def test_the_callers_environment_does_not_leak_in() -> None:
    assert torch.set_flush_denormal(True)
    try:
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        total = GradientSum(nn.ParameterList([parameter]))
        parameter.backward(torch.tensor([2.0**-24, -3 * 2.0**-24], dtype=torch.float64).half())
        total.finish()
        assert parameter.grad.view(torch.int16).tolist() == [1, -0x8000 + 3]
    finally:
        torch.set_flush_denormal(False)


# --- planted bugs: what these tests would say --------------------------------------------------------------------
def test_a_planted_float_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one rank that are added up in floats before they are rounded."""

    def add(self: Any, gradient: Any, peaks: Any) -> None:
        waiting = getattr(self.parameter, "waiting", None)
        self.parameter.waiting = gradient if waiting is None else waiting + gradient
        self.of(self.bucket.total).copy_(torch.round(self.flat(self.parameter.waiting).double() * 2.0**48).long())
        self.seen = True

    monkeypatch.setattr(buckets.Slot, "add", add)
    with pytest.raises(AssertionError):
        check(mlp, squared)


def test_a_planted_truncation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(g: Any, total: Any, peaks: Any, index: int, quantum: int, limit: int, first: bool) -> None:
        units = torch.trunc(g.double() * 2.0**-quantum).long()
        total.copy_(units if first else total + units)

    monkeypatch.setattr(buckets.kernels, "accumulate", accumulate)
    with pytest.raises(AssertionError):
        check(mlp, squared, quantum=-30)
