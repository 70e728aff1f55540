"""Norms of sums with a residual: the bits of the sum and of the norm of it, forward and backward, everywhere."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops import OPERATIONS

KINDS = ["rmsnorm", "layernorm"]


def given(kind, shape=(4, 3, 24), dtype="float32", seed=0):
    """(x, residual, dy, dsummed, what lies along the axis)."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal(shape).astype(dtype) for _ in range(4)]
    return *rows, [rng.standard_normal(shape[-1]).astype(dtype) for _ in range(1 + (kind == "layernorm"))]


def of_two(kind, x, residual, dy, dsummed, along):
    """(y, sum, dx, gradients along the axis) in steps; those of a sum are added in its dtype."""
    summed = x + residual
    flag = "return_rstd" if kind == "rmsnorm" else "return_statistics"
    y, *statistics = getattr(ig, kind)(summed, *along, **{flag: True})
    dx, *others = getattr(ig, f"{kind}_backward")(dy, summed, *statistics, along[0])
    return [y, summed, dx + dsummed, *others]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_two_steps(kind, dtype):
    for i, shape in enumerate([(4, 3, 24), (5, 1), (2, 5000), (700, 8)]):
        *arrays, along = given(kind, shape, dtype, i)
        x, residual, dy, dsummed = arrays
        right = of_two(kind, *arrays, along)
        flag = "return_rstd" if kind == "rmsnorm" else "return_statistics"
        y, summed, *statistics = getattr(ig, f"add_{kind}")(x, residual, *along, **{flag: True})
        found = getattr(ig, f"add_{kind}_backward")(dy, summed, *statistics, dsummed, along[0])
        assert [a.tobytes() for a in (y, summed, *found)] == [a.tobytes() for a in right]
        alone = getattr(ig, f"add_{kind}_backward")(dy, summed, *statistics, None, along[0])
        assert alone[0].tobytes() == getattr(ig, f"{kind}_backward")(dy, summed, *statistics, along[0])[0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_tape_both_results_have_gradients(kind):
    x, residual, dy, dsummed, along = given(kind)
    right = of_two(kind, x, residual, dy, dsummed, along)
    tape = ig.Tape()
    leaves = [tape.leaf(a) for a in (x, residual, *along)]
    y, summed = getattr(ig, f"add_{kind}")(*leaves)
    loss = (y * dy).sum() + (summed * dsummed).sum()
    found = tape.backward(loss)
    assert y.value.tobytes() == right[0].tobytes()
    assert summed.value.tobytes() == right[1].tobytes()
    assert found[leaves[0]].tobytes() == found[leaves[1]].tobytes() == right[2].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_and_are_not_idle(kind, dtype):
    worst = []
    for i, scale in enumerate((1.0, 2.0**-9, 2.0**5)):
        x, residual, dy, dsummed, along = given(kind, (20, 300), dtype, i)
        residual = (residual * scale).astype(dtype)
        names = ("weight", "bias")[: len(along)]
        forward = {"x": x, "residual": residual, **dict(zip(names, along, strict=True))}
        op = OPERATIONS[f"add_{kind}"]
        results = op.reference(**forward)
        worst.append(
            [worst_error(*a) for a in zip(results, op.oracle(**forward), op.bound(dtype, **forward), strict=True)]
        )
        back = OPERATIONS[f"add_{kind}_backward"]
        inputs = {"dy": dy, **dict(zip(op.outputs, results, strict=True)), "dsummed": dsummed, "weight": along[0]}
        inputs.pop("y")
        asked = {key: True for key, a in back.outputs.items() if a.optional}
        every = [f(**inputs, **asked) for f in (back.reference, back.oracle)]
        worst.append([worst_error(*a) for a in zip(*every, back.bound(dtype, **inputs, **asked), strict=True)])
    assert max(map(max, worst)) <= 1, worst
    assert min(map(max, worst)) > 0.2, worst


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind):
    x, residual, *_ = given(kind)
    for wrong, said in ((residual[:2], "shape"), (residual.astype(np.float64), "dtype")):
        with pytest.raises(ig.InvalidProblemError, match=f"^add_{kind}: .*{said}"):
            getattr(ig, f"add_{kind}")(x, wrong)

    x = ig.Tape().leaf(x)
    for wrong in (residual[:, :1], residual[0], 2.0):
        with pytest.raises(ig.InvalidProblemError, match=rf"^add_{kind}: x has shape \(4, 3, 24\) and residual "):
            getattr(ig, f"add_{kind}")(x, wrong)


# --- torch -----------------------------------------------------------------------------------------------------------
def in_torch(kind):
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    function = igt.rms_norm if kind == "rmsnorm" else igt.layer_norm
    if kind == "rmsnorm":
        return torch, lambda x, r, *along: function(x, x.shape[-1:], *along, 1e-6, residual=r)
    return torch, lambda x, r, *along: function(x, x.shape[-1:], *along, residual=r)


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_has_the_bits_of_two_steps(kind):
    torch, function = in_torch(kind)
    *arrays, along = given(kind)
    right = of_two(kind, *arrays, along)
    x, residual, dy, dsummed = (torch.from_numpy(a) for a in arrays)
    leaves = [x, residual, *(torch.from_numpy(a) for a in along)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y, summed = function(*leaves)
    found = torch.autograd.grad((y, summed), leaves, (dy, dsummed), retain_graph=True)
    assert [t.detach().numpy().tobytes() for t in (y, summed, *found[1:])] == [a.tobytes() for a in right]
    assert torch.equal(found[0], found[1])
    # Where one of the two is not used.
    sums = getattr(ig, f"add_{kind}_backward")
    flag = "return_rstd" if kind == "rmsnorm" else "return_statistics"
    _, _, *statistics = getattr(ig, f"add_{kind}")(*arrays[:2], *along, **{flag: True})
    (dx,) = torch.autograd.grad(y, residual, dy, retain_graph=True)
    assert dx.numpy().tobytes() == sums(arrays[2], right[1], *statistics, None, along[0])[0].tobytes()
    (dx,) = torch.autograd.grad(summed, residual, dsummed)
    assert torch.equal(dx, dsummed)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_and_transforms(kind):
    torch, function = in_torch(kind)
    from torch._dynamo.backends.registry import lookup_backend

    *arrays, along = given(kind, (3, 2, 7), "float64")
    rows = [torch.from_numpy(a) for a in arrays[:2]]
    weights = [torch.from_numpy(a) for a in along]
    leaves = [t.requires_grad_() for t in (*rows, *weights)]
    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves)
    torch.autograd.gradgradcheck(lambda *given: function(*given)[0], leaves)

    def in_steps(x, r, *along):
        x = x + r
        if kind == "rmsnorm":
            return torch.nn.functional.rms_norm(x, x.shape[-1:], *along, 1e-6), x
        return torch.nn.functional.layer_norm(x, x.shape[-1:], *along), x

    plain = tuple([t.detach() for t in leaves])
    tangents = tuple([torch.randn_like(t) for t in plain])
    for ours, theirs in zip(*(torch.func.jvp(f, plain, tangents)[1] for f in (function, in_steps)), strict=True):
        torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(function, backend=lookup_backend("aot_eager"), fullgraph=True)
    for ours, theirs in zip(compiled(*leaves), function(*leaves), strict=True):
        assert torch.equal(ours, theirs)
    y, summed = torch.func.vmap(lambda x, r: function(x, r, *plain[2:]))(*plain[:2])
    assert torch.equal(y, function(*plain)[0])
    assert torch.equal(summed, plain[0] + plain[1])
    with pytest.raises(ig.InvalidProblemError, match=r"_norm: residual has shape \(2, 2, 7\)"):
        function(plain[0], plain[1][:2], *plain[2:])


@pytest.mark.parametrize("kind", KINDS)
def test_several_dimensions(kind):
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x, residual, *_ = (torch.from_numpy(a) for a in given(kind)[:2])
    function = igt.rms_norm if kind == "rmsnorm" else igt.layer_norm
    y, summed = function(x, (3, 24), residual=residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(y, function(x + residual, (3, 24)))
