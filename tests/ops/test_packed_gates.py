"""swiglu and geglu: the bits of their halves, in every front end and layout."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops import OPERATIONS

FORMS = [("swiglu", "silu_mul", {}), ("geglu", "gelu_mul", {"approximate": "none"})]
FORMS += [("geglu", "gelu_mul", {"approximate": "tanh"})]
SHAPES = [(5, 3, 40), (7, 2), (6,), (3, 2048), (0, 4), (2, 0)]


def halves(x):
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def arrays(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    return rng.standard_normal((*shape[:-1], shape[-1] // 2)).astype(dtype), x.astype(dtype)


@pytest.mark.parametrize(("name", "of", "options"), FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bits_are_those_of_the_halves(name, of, options, dtype):
    for i, shape in enumerate(SHAPES):
        dy, x = arrays(shape, dtype, i)
        gate, up = halves(x)
        strided = np.empty((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
        strided[...] = x
        for given in (x, strided, np.asfortranarray(x)):
            assert getattr(ig, name)(given, **options).tobytes() == getattr(ig, of)(gate, up, **options).tobytes()
            dx = getattr(ig, f"{name}_backward")(dy, given, **options)
            right = np.concatenate(getattr(ig, f"{of}_backward")(dy, gate, up, **options), -1)
            assert dx.shape == x.shape
            assert np.array_equal(np.ascontiguousarray(dx).view(np.uint8), right.view(np.uint8))


@pytest.mark.parametrize(("name", "of", "options"), FORMS)
def test_the_gradient_may_lie_where_the_input_was(name, of, options):
    dy, x = arrays((4, 60))
    right = getattr(ig, f"{name}_backward")(dy, x, **options)
    plan_type, descriptor_type = (getattr(ig, f"{name.capitalize()}Backward{kind}") for kind in ("Plan", "Descriptor"))
    plan_type.select(descriptor_type(x.shape, "float32", **options)).run(dy=dy, x=x, dx=x)
    assert x.tobytes() == right.tobytes()


@pytest.mark.parametrize(("name", "of", "options"), FORMS)
def test_on_the_tape(name, of, options):
    dy, x = arrays((3, 10))
    tape = ig.Tape()
    leaf = tape.leaf(x)
    y = getattr(ig, name)(leaf, **options)
    assert tape.backward(y, dy)[leaf].tobytes() == getattr(ig, f"{name}_backward")(dy, x, **options).tobytes()


@pytest.mark.parametrize(("name", "of", "options"), FORMS)
def test_bounds_hold(name, of, options):
    dy, x = arrays((30, 200))
    for given, op in (({"x": x}, OPERATIONS[name]), ({"dy": dy, "x": x}, OPERATIONS[f"{name}_backward"])):
        found = op.reference(**given, **options)
        assert worst_error(found, op.oracle(**given, **options), op.bound("float32", **given, **options)) <= 1


def test_errors():
    dy, x = arrays((3, 6))
    for wrong in (x[:, :5], x[0, 0]):
        with pytest.raises(ig.InvalidProblemError, match=r"^swiglu: "):
            ig.swiglu(wrong)
    with pytest.raises(ig.InvalidProblemError, match=r"^geglu_backward: dy has shape"):
        ig.geglu_backward(dy[:2], x)
    with pytest.raises(ig.InvalidProblemError, match=r"^geglu: approximate"):
        ig.geglu(x, "erf")
    with pytest.raises(ig.UnsupportedError, match=r"^swiglu: "):
        ig.swiglu(x.astype(np.int32))


# --- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "of", "options"), FORMS)
def test_in_torch(name, of, options):
    torch = pytest.importorskip("torch", reason="needs torch")
    from torch._dynamo.backends.registry import lookup_backend

    import isograd.torch as igt

    dy, x = (torch.from_numpy(a) for a in arrays((4, 3, 14)))

    def function(x):
        return getattr(igt, name)(x, *options.values())

    x.requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    right = np.concatenate(getattr(ig, f"{of}_backward")(dy.numpy(), *halves(x.detach().numpy()), **options), -1)
    assert dx.numpy().tobytes() == right.tobytes()
    assert dx.is_contiguous()
    compiled = torch.compile(function, backend=lookup_backend("aot_eager"), fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x), x, dy)[0], dx)
    for dim in range(2):
        assert torch.equal(torch.func.vmap(function, dim)(x), y.movedim(dim, 0))
    pulled = torch.func.vmap(lambda x, dy: torch.func.vjp(function, x)[1](dy)[0])(x.detach(), dy)
    assert torch.equal(pulled, dx)
    wide = x.detach().double().requires_grad_()
    torch.autograd.gradcheck(function, wide)
    torch.autograd.gradgradcheck(function, wide)
    tangent = torch.randn_like(wide)
    moved = torch.func.jvp(function, (wide.detach(),), (tangent,))[1]
    other = torch.func.jvp(lambda x: getattr(igt, of)(*x.chunk(2, -1), *options.values()), (wide.detach(),), (tangent,))
    torch.testing.assert_close(moved, other[1])
    torch.library.opcheck(getattr(torch.ops.isograd, name).default, (x, *options.values()))
    torch.library.opcheck(getattr(torch.ops.isograd, f"{name}_backward").default, (dy, x, *options.values()))
