"""What is special about silu and gelu alone: the bounds under attack, and torch's derivatives."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops import OPERATIONS

FORMS = {
    "silu": ("silu", {}),
    "none": ("gelu", {"approximate": "none"}),
    "tanh": ("gelu", {"approximate": "tanh"}),
}


def attacks(dtype):
    """(dy, x): of every size, where slopes vanish, and where the gradient is subnormal or overflows."""
    rng = np.random.default_rng(7)
    least, most = {"float16": (-24, 15), "float64": (-1070, 1020)}.get(dtype, (-148, 126))
    for scale in (0.5, 4.0, 30.0, 300.0):
        yield rng.standard_normal(4000), rng.standard_normal(4000) * scale
    for root in (-1.2784645, -0.7517916, -0.7524614):
        yield rng.standard_normal(4000), root * (1 + 1e-3 * rng.standard_normal(4000))
    dy, x = (rng.choice([-1, 1], 4000) * np.exp2(rng.uniform(least, most, 4000)) for _ in range(2))
    yield dy, x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bounds_hold_and_are_not_idle(dtype, form):
    name, options = FORMS[form]
    worst = {"y": 0.0, "dx": 0.0}
    for arrays in attacks(dtype):
        with np.errstate(all="ignore"):
            dy, x = (a.astype(dtype) for a in arrays)
        for key, op, given in (
            ("y", OPERATIONS[name], {"x": x}),
            ("dx", OPERATIONS[f"{name}_backward"], {"dy": dy, "x": x}),
        ):
            got = getattr(ig, op.name)(*given.values(), **options)
            right, bounds = op.oracle(**given, **options), op.bound(dtype, **given, **options)
            worst[key] = max(worst[key], worst_error(got, right, bounds))
    assert all(0.2 < value <= 1 for value in worst.values()), worst


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_are_torchs_own(form):
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    name, options = FORMS[form]
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for function in (getattr(igt, name), getattr(torch.nn.functional, name)):
        y = function(x, **options)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        pushed = torch.func.jvp(lambda x, f=function: torch.func.grad(lambda t: f(t, **options).sum())(x), (x,), (x,))
        results.append((y, first, second, *pushed))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_of_large_numbers_are_zero(form):
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    name, options = FORMS[form]
    x = torch.tensor([1e38, -1e38, 1e20, torch.inf, 2e3, -2e3], requires_grad=True)
    (first,) = torch.autograd.grad(getattr(igt, name)(x, **options).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [1, 0, 1, 1, 1, 0]
    assert second.tolist() == [0] * 6
