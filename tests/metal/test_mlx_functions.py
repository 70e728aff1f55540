"""isograd.mlx as it is where MLX has no Apple GPU: on the CPU's kernels, differentiated by MLX."""

import sys
from typing import Any

import numpy as np
import pytest
from problems import BFLOAT16, DTYPES, same_bits, stored

mx = pytest.importorskip("mlx.core", reason="needs mlx")

import isograd  # noqa: E402
import isograd.mlx as igm  # noqa: E402
from isograd.devices.mlx_kernel import _from_numpy, _to_numpy  # noqa: E402
from isograd.errors import IndexOutOfRangeError, InvalidProblemError, UnsupportedError  # noqa: E402

RNG = np.random.default_rng(1)
X = RNG.standard_normal((4, 30))


def _array(a: Any) -> np.ndarray[Any, Any]:
    return _to_numpy("test", a)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_softmax_and_its_gradient(kind: str, axis: int, dtype: str) -> None:
    x, g = (X, X[::-1]) if dtype == "float64" else (stored(X, dtype), stored(X[::-1], dtype))
    y, (dx,) = mx.vjp(lambda a: getattr(igm, kind)(a, axis), [_from_numpy(x)], [_from_numpy(np.array(g))])
    expected = getattr(isograd, kind)(x, axis)
    assert same_bits(_array(y[0]), expected)
    assert same_bits(_array(dx), getattr(isograd, f"{kind}_backward")(np.array(g), expected, axis))


@pytest.mark.parametrize("index_dtype", ["int32", "int64", "uint32"])
def test_take_along_axis_and_its_gradients(index_dtype: str) -> None:
    x, indices = X.astype(np.float32), RNG.integers(0, 30, (4, 50)).astype(index_dtype)
    places = mx.array(indices)
    v = igm.take_along_axis(mx.array(x), places)
    assert same_bits(np.array(v), isograd.take_along_axis(x, indices))
    dv = RNG.standard_normal((4, 50)).astype(np.float32)

    def loss(a: Any) -> Any:
        return (igm.take_along_axis(a, places) * mx.array(dv)).sum()

    dx = mx.grad(loss)(mx.array(x))
    assert same_bits(np.array(dx), isograd.take_along_axis_backward(dv, indices, (4, 30)))

    def square(a: Any) -> Any:
        return (mx.grad(lambda b: (igm.take_along_axis(b, places) ** 2).sum())(a) ** 2).sum()

    counts = np.stack([np.bincount(row.astype(int), minlength=30) for row in indices])
    assert np.allclose(np.array(mx.grad(square)(mx.array(x))), 8 * counts**2 * x, rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_router_and_its_gradient(scoring: str, with_bias: bool) -> None:
    logits, bias = stored(X, "bfloat16"), (RNG.standard_normal(30) / 8).astype(np.float32)
    options: dict[str, Any] = {"scoring": scoring, "renormalize": True, "scale": 2.5, "groups": 5, "group_k": 2}
    given = {"bias": mx.array(bias)} if with_bias else {}
    weights, experts = igm.moe_router(_from_numpy(logits), 3, **options, **given)
    expected = isograd.moe_router(logits, 3, **options, bias=bias if with_bias else None)
    assert same_bits(np.array(weights), expected[0])
    assert same_bits(np.array(experts), expected[1])
    g = RNG.standard_normal((4, 3)).astype(np.float32)

    def loss(a: Any, *b: Any) -> Any:
        return (igm.moe_router(a, 3, **options, bias=b[0] if b else None)[0] * mx.array(g)).sum()

    primals = [_from_numpy(logits), *given.values()]
    found = mx.grad(loss, argnums=tuple(range(len(primals))))(*primals)
    gradients = found if isinstance(found, tuple) else (found,)  # of one argument without a tuple
    kept = {name: options[name] for name in ("scoring", "renormalize", "scale")}
    assert same_bits(_array(gradients[0]), isograd.moe_router_backward(g, logits, expected[1], **kept))
    assert not any(np.array(b).any() for b in gradients[1:])


def _attention_problem(dtype: str) -> list[np.ndarray[Any, Any]]:
    return [stored(RNG.standard_normal((2, heads, n, 16)), dtype) for heads, n in ((4, 9), (2, 12), (2, 12), (4, 9))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients(causal: bool, dtype: str) -> None:
    q, k, v, do = _attention_problem(dtype)
    dlse = RNG.standard_normal((2, 4, 9)).astype(np.float32)
    (o, lse), gradients = mx.vjp(
        lambda *a: igm.attention(*a, causal=causal, scale=0.5, return_lse=True),
        [_from_numpy(a) for a in (q, k, v)],
        [_from_numpy(do), mx.array(dlse)],
    )
    expected = isograd.attention(q, k, v, causal=causal, scale=0.5, return_lse=True)
    assert same_bits(_array(o), expected[0])
    assert same_bits(np.array(lse), expected[1])
    wanted = isograd.attention_backward(do, q, k, v, *expected, causal=causal, scale=0.5, dlse=dlse)
    assert all(same_bits(_array(g), w) for g, w in zip(gradients, wanted[:3], strict=True))
    assert same_bits(_array(igm.attention(*[_from_numpy(a) for a in (q, k, v)], causal=causal, scale=0.5)), expected[0])
    assert same_bits(np.array(igm.attention_delta(o, _from_numpy(do))), isograd.attention_delta(expected[0], do))


_Q = mx.zeros((1, 2, 3, 16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: igm.attention(_Q, _Q, 3), "attention: v is int; expected an MLX array"),
        (lambda: igm.attention(_Q, _Q, _Q[0]), r"attention: v has shape \(2, 3, 16\); expected \[batch, heads"),
        (
            lambda: igm.attention(_Q, _Q[..., :8], _Q),
            r"attention: k has shape \(1, 2, 3, 8\); expected \(1, 2, 3, 16\)",
        ),
        (lambda: igm.attention(_Q, _Q, _Q.astype(mx.float16)), "attention: v has dtype float16 and q float32"),
        (lambda: igm.attention(_Q, _Q, _Q, causal=1), "attention: causal is 1; expected True or False"),
        (lambda: igm.attention_delta(_Q, _Q[0]), r"attention_delta: o has shape \(1, 2, 3, 16\)"),
        (lambda: mx.grad(lambda o: igm.attention_delta(o, _Q).sum())(_Q), "attention_delta: its own gradient"),
    ],
)
def test_errors_of_attention(call: Any, message: str) -> None:
    with pytest.raises((InvalidProblemError, UnsupportedError), match=message):
        call()


def test_training_lowers_a_loss() -> None:
    rows = RNG.standard_normal((64, 10)).astype(np.float32)
    x, target = mx.array(rows), mx.array(rows.argmax(-1)[:, None])

    def loss(w: Any) -> Any:
        return -igm.take_along_axis(igm.log_softmax(x @ w), target).mean()

    w = mx.zeros((10, 10))
    before = loss(w).item()
    for _ in range(20):
        w = w - mx.grad(loss)(w)
    assert loss(w).item() < 0.7 * before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: igm.softmax(np.zeros(3)), InvalidProblemError, "softmax: x is ndarray; expected an MLX array"),
        (lambda: igm.log_softmax(mx.zeros(3), 1.0), InvalidProblemError, "log_softmax: axis is 1.0"),
        (lambda: igm.softmax(mx.zeros(3), 1), InvalidProblemError, "softmax: axis is 1; shape"),
        (lambda: igm.softmax(mx.zeros(3, dtype=mx.int32)), UnsupportedError, "softmax: dtype is 'int32'"),
        (lambda: igm.take_along_axis(mx.zeros(3), 1), InvalidProblemError, "take_along_axis: indices is int"),
        (
            lambda: igm.take_along_axis(mx.zeros((2, 3)), mx.zeros((1, 3), dtype=mx.int32)),
            InvalidProblemError,
            "take_along_axis: indices_shape is",
        ),
        (
            lambda: igm.take_along_axis(mx.zeros(3), mx.array([3])),
            IndexOutOfRangeError,
            r"take_along_axis: indices\[0\] is 3",
        ),
        (lambda: igm.moe_router(mx.zeros((2, 4)), 5), InvalidProblemError, "moe_router: k is 5; accepted: 1 to 4"),
        (
            lambda: igm.moe_router(mx.zeros((2, 4)), 2, bias=mx.zeros(3)),
            InvalidProblemError,
            r"moe_router: bias has shape \(3,\) and dtype float32; expected \(4,\) and float32",
        ),
        (lambda: mx.jvp(igm.softmax, [mx.zeros(3)], [mx.zeros(3)]), UnsupportedError, "forward-mode differentiation"),
        (lambda: mx.vmap(igm.softmax)(mx.zeros((2, 3))), UnsupportedError, "compile or vmap"),
        (lambda: mx.compile(igm.log_softmax)(mx.zeros((2, 3))), UnsupportedError, "compile or vmap"),
        (
            lambda: mx.grad(lambda x: mx.grad(lambda z: igm.softmax(z)[0])(x)[0])(mx.zeros(3)),
            UnsupportedError,
            "softmax_backward: its own gradient is not supported",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_plans_are_for_functions_of_arrays() -> None:
    descriptor = isograd.SoftmaxDescriptor((2, 3), "bfloat16")
    plan = isograd.SoftmaxPlan.select(descriptor, device="mlx")
    assert plan.kernel.name == "cpu"
    assert plan.precision_guarantee.bit_stable_across_hardware
    with pytest.raises(UnsupportedError, match="metal: MLX has no Metal back end here"):
        isograd.SoftmaxPlan.select(descriptor, device="mlx", preference="metal")
    with pytest.raises(InvalidProblemError, match="x is array; expected a NumPy array or a torch tensor"):
        plan.run(x=mx.zeros((2, 3)), y=mx.zeros((2, 3)))
    with pytest.raises(UnsupportedError, match=r"isograd.mlx returns new ones"):
        plan.kernel.launch(descriptor, {}, None, None)


def test_nothing_to_compute() -> None:
    assert igm.softmax(mx.zeros((0, 3))).shape == (0, 3)
    assert igm.take_along_axis(mx.zeros((2, 3)), mx.zeros((2, 0), dtype=mx.int32)).shape == (2, 0)


def test_bfloat16_keeps_its_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(_array(_from_numpy(bits.view(BFLOAT16))).view(np.uint16), bits)


def test_without_mlx(run_python: Any) -> None:
    code = """
    import sys
    sys.modules["mlx"] = sys.modules["mlx.core"] = None
    try:
        import isograd.mlx
    except ImportError as error:
        print(error)
    """
    assert run_python(code) == "isograd.mlx needs MLX, which is not installed: pip install 'isograd[mlx]'"
    assert "isograd.mlx" in sys.modules
