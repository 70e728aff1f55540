"""What is special about gated activations: the bounds under attack, special values, and torch's derivatives."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops import OPERATIONS

FORMS = {
    "silu": ("silu_mul", {}),
    "none": ("gelu_mul", {"approximate": "none"}),
    "tanh": ("gelu_mul", {"approximate": "tanh"}),
}


def attacks(dtype):
    """(dy, gate, up): gates of every size, where slopes vanish, and products that are subnormal or overflow."""
    rng = np.random.default_rng(7)
    least, most = {"float16": (-24, 15), "float64": (-1070, 1020)}.get(dtype, (-148, 126))
    for scale in (0.5, 4.0, 30.0, 300.0):
        yield rng.standard_normal(4000), rng.standard_normal(4000) * scale, rng.standard_normal(4000)
    for root in (-1.2784645, -0.7517916, -0.7524614):
        yield rng.standard_normal(4000), root * (1 + 1e-3 * rng.standard_normal(4000)), rng.standard_normal(4000)
    dy, gate, up = (rng.choice([-1, 1], 4000) * np.exp2(rng.uniform(least, most, 4000)) for _ in range(3))
    yield dy, gate, up


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bounds_hold_and_are_not_idle(dtype, form):
    name, options = FORMS[form]
    worst = {"y": 0.0, "dgate": 0.0, "dup": 0.0}
    for arrays in attacks(dtype):
        with np.errstate(all="ignore"):
            dy, gate, up = (a.astype(dtype) for a in arrays)
        for op, given in (
            (OPERATIONS[name], {"gate": gate, "up": up}),
            (OPERATIONS[f"{name}_backward"], {"dy": dy, "gate": gate, "up": up}),
        ):
            got = getattr(ig, op.name)(*given.values(), **options)
            right, bounds = op.oracle(**given, **options), op.bound(dtype, **given, **options)
            if len(op.outputs) == 1:
                got, right, bounds = (got,), (right,), (bounds,)
            for key, *each in zip(op.outputs, got, right, bounds, strict=True):
                worst[key] = max(worst[key], worst_error(*each))
    assert all(0.2 < value <= 1 for value in worst.values()), worst


def test_the_oracle_is_gelu():
    mpmath = pytest.importorskip("mpmath")
    x = np.array([-37.0, -8.3, -1.1, -1e-3, 0.0, 0.4, 3.3, 9.0])
    found = OPERATIONS["gelu_mul"].oracle(gate=x, up=np.ones_like(x))
    with mpmath.workdps(40):
        right = [mpmath.mpf(v) * mpmath.erfc(-mpmath.mpf(v) / mpmath.sqrt(2)) / 2 for v in x]
        assert all(abs(mpmath.mpf(float(a)) - r) <= 3e-16 * abs(r) for a, r in zip(found, right, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_special_values(form):
    name, options = FORMS[form]
    gate = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, -np.inf, 1.0], np.float32)
    up = np.array([2.0, 2.0, 2.0, -3.0, 3.0, np.inf, np.inf], np.float32)
    y = getattr(ig, name)(gate, up, **options)
    expected = np.array([np.inf, -0.0, np.nan, -0.0, -0.0, np.nan, np.inf], np.float32)
    assert y.tobytes() == expected.tobytes()
    dgate, dup = getattr(ig, f"{name}_backward")(np.ones_like(up), gate, up, **options)
    assert np.array_equal(dgate, np.array([2, 0, np.nan, -1.5, 1.5, np.nan, np.inf], np.float32), equal_nan=True)
    assert np.array_equal(dup[:2], [np.inf, 0])


def test_halves_of_a_packed_array_are_read_in_place():
    x = np.random.default_rng(0).standard_normal((5, 3, 40)).astype(np.float32)
    gate, up = np.split(x, 2, -1)
    assert ig.silu_mul(gate, up).tobytes() == ig.silu_mul(gate.copy(), up.copy()).tobytes()
    dx = np.empty_like(x)
    ig.SiluMulBackwardPlan.select(ig.SiluMulBackwardDescriptor(gate.shape, "float32"), "cpu").run(
        dy=gate, gate=gate, up=up, dgate=dx[..., :20], dup=dx[..., 20:]
    )
    expected = np.concatenate(ig.silu_mul_backward(gate, gate, up), -1)
    assert dx.tobytes() == expected.tobytes()


# --- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
def test_derivatives_are_torchs_own(form):
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    name, options = FORMS[form]
    own = torch.nn.functional.silu if form == "silu" else torch.nn.functional.gelu
    gate, up = (torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    results = []
    for y in (getattr(igt, name)(gate, up, **options), own(gate, **options) * up):
        first = torch.autograd.grad(y.square().sum(), (gate, up), create_graph=True)
        second = torch.autograd.grad(first[0].sin().sum() + first[1].square().sum(), (gate, up))
        results.append((y, *first, *second))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_packed_forms_are_those_of_their_halves():
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x = torch.randn(4, 3, 14, generator=torch.Generator().manual_seed(3)).requires_grad_()
    gate, up = (half.detach().contiguous().requires_grad_() for half in x.chunk(2, -1))
    for packed, halves in (
        (igt.swiglu(x), igt.silu_mul(gate, up)),
        (igt.geglu(x, "tanh"), igt.gelu_mul(gate, up, "tanh")),
    ):
        assert torch.equal(packed, halves)
        (dx,) = torch.autograd.grad(packed.square().sum(), x)
        assert torch.equal(dx, torch.cat(torch.autograd.grad(halves.square().sum(), (gate, up)), -1))
    for wrong in (x[..., :13], x[0, 0, 0]):
        with pytest.raises(ig.InvalidProblemError, match="even size"):
            igt.swiglu(wrong)
