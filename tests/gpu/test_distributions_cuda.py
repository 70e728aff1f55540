"""Divergences, gumbel_softmax and sparsemax on a real GPU: the bits of the NumPy reference."""

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "losses"))
from distributions import named, reference, values  # noqa: E402

import isograd as ig  # noqa: E402

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
FLAVOURS = ("normal", "spread", "special", "masked", "offset")
each_dtype = pytest.mark.parametrize("dtype", NUMPY)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")


def to_torch(x: Any) -> Any:
    if x.dtype.name == "uint32":
        return torch.from_numpy(np.array(x).view(np.int32)).cuda().view(torch.uint32)
    if x.dtype.name not in NUMPY:
        return torch.from_numpy(np.array(x)).cuda()
    array = np.array(x, order="K")
    return torch.from_numpy(array.view(INTEGER[array.itemsize])).cuda().view(getattr(torch, x.dtype.name))


def raw(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        t = t.contiguous().view(getattr(torch, np.dtype(INTEGER[t.element_size()]).name)).cpu().numpy()
    t = np.array(t, order="C")
    return t.shape, t.tobytes()


def check(operation: str, *arrays: Any, **options: Any) -> Any:
    """The library on tensors of the GPU against the reference on arrays."""
    given = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    got = getattr(ig, operation)(*map(to_torch, arrays), **given)
    assert got.is_cuda
    with np.errstate(all="ignore"):
        assert raw(got) == raw(reference(operation)(*arrays, **options)), (operation, options)
    return got


def work(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


@each_dtype
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_kl_div(dtype: str, flavour: str) -> None:
    rng = np.random.default_rng(0)
    for shape in ((7,), (40, 129), (3, 5, 7), (), (1, 300_000)):
        x, t = (values(rng, flavour, shape, NUMPY[dtype]) for _ in range(2))
        for x_, t_ in ((x, t), (x.T, t.T.copy())):
            for i, reduction in enumerate(("none", "sum", "mean", "batchmean")):
                options = {"reduction": reduction, "log_target": bool(i % 2)}
                check("kl_div", x_, t_, **options)
                g = values(rng, "normal", x_.shape if reduction == "none" else (), work(dtype))
                for wrt in ("input", "target"):
                    check("kl_div_backward", g, x_, t_, **options, wrt=wrt)


SHAPES = ((33, 1), (70, 3), (40, 255), (5, 4096), (2, 20_000), (2, 3, 50), (1, 140_000))


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_distillation(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    for i, flavour in enumerate(FLAVOURS[: 2 if shape[-1] > 10_000 else 5]):
        x, t = (values(rng, flavour, shape, NUMPY[dtype]) for _ in range(2))
        reduction = ("none", "batchmean", "mean", "sum")[i % 4]
        options: dict[str, Any] = {"temperature": (1.0, 2.0, 0.7)[i % 3], "reduction": reduction}
        g = values(rng, "normal", shape[:-1] if reduction == "none" else (), work(dtype))
        check("distillation_loss", x, t, **options)
        check("distillation_loss_backward", g, x, t, **options)
        for k in (1, 9, 100):
            if k > shape[-1]:
                continue
            clean = rng.standard_normal(shape).astype(NUMPY[dtype])
            kept, indices = named(rng, clean, k, (np.int32, np.int64, np.uint32)[i % 3])
            if i % 2:
                x[..., 0] = 60  # a student whose rest is small
            check("distillation_loss", x, kept, indices=indices, **options)
            check("distillation_loss_backward", g, x, kept, indices=indices, **options)


@each_dtype
def test_logits_over_the_temperature_beyond_the_range(dtype: str) -> None:
    rng = np.random.default_rng(4)
    for n in (3, 300, 20_000):
        x, t = (values(rng, "largest", (4, n), NUMPY[dtype]) for _ in range(2))
        kept, indices = named(rng, t / 8, 2)
        options: dict[str, Any] = {"temperature": 0.01, "reduction": "none"}
        g = np.ones(4, work(dtype))
        check("distillation_loss", x, t, **options)
        check("distillation_loss_backward", g, x, t, **options)
        check("distillation_loss", x, kept, indices=indices, **options)
        check("distillation_loss_backward", g, x, kept, indices=indices, **options)


def test_distillation_in_place_and_of_another_width() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 3000)).astype(ml_dtypes.bfloat16)
    t = rng.standard_normal((64, 3000)).astype(np.float32)
    g = np.ones((), np.float32)
    check("distillation_loss", x, t)
    kept, indices = named(rng, t, 20)
    for teacher, options in ((t, {}), (kept, {"indices": indices})):
        expected = raw(reference("distillation_loss_backward")(g, x, teacher, **options))
        given = {k: to_torch(v) for k, v in options.items()}
        logits = to_torch(x)
        ig.distillation_loss_backward(to_torch(g), logits, to_torch(teacher), **given, out=logits)
        assert raw(logits) == expected


@pytest.mark.parametrize(("dtype", "n", "count"), [("float32", 4096, 2000), ("bfloat16", 40_000, 150)])
def test_clusters_take_one_row_after_another(dtype: str, n: int, count: int) -> None:
    """More rows than there are clusters, a few of all kinds in a random order."""
    rng = np.random.default_rng(7)
    few = [np.concatenate([values(rng, f, (4, n), NUMPY[dtype]) for f in FLAVOURS]) for _ in range(2)]
    g, which = values(rng, "normal", (20,), np.float32), rng.integers(0, 20, count)
    options: dict[str, Any] = {"temperature": 2.0, "reduction": "none"}
    with np.errstate(all="ignore"):
        losses = reference("distillation_loss")(*few, **options)
        dx = reference("distillation_loss_backward")(g, *few, **options)
    many = [to_torch(a[which]) for a in (g, *few)]
    assert raw(ig.distillation_loss(*many[1:], **options)) == raw(losses[which])
    assert raw(ig.distillation_loss_backward(*many, **options)) == raw(dx[which])
    ig.distillation_loss_backward(*many, **options, out=many[1])
    assert raw(many[1]) == raw(dx[which])


def test_long_rows_at_any_place() -> None:
    rng = np.random.default_rng(8)
    x, t = (rng.standard_normal((20, 4128)).astype(ml_dtypes.bfloat16) for _ in range(2))
    wide = [to_torch(a) for a in (x, t)]
    for first, n in ((16, 4096), (8, 4112), (1, 4096), (0, 4104)):  # at multiples of 16 elements, of 16 bytes, of less
        with np.errstate(all="ignore"):
            right = reference("distillation_loss")(x[:, first : first + n], t[:, first : first + n], reduction="none")
        assert raw(ig.distillation_loss(*(a[:, first : first + n] for a in wide), reduction="none")) == raw(right)


def test_a_bad_index_makes_its_row_nan_and_is_reported() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((9, 50)).astype(np.float32)
    kept, indices = named(rng, x, 5)
    right = reference("distillation_loss")(x, kept, indices, reduction="none")
    for value in (50, -1, 2**40, int(indices[4, 0])):
        bad = indices.copy()
        bad[4, 2] = value
        losses = ig.distillation_loss(*map(to_torch, (x, kept)), indices=to_torch(bad), reduction="none").cpu().numpy()
        assert np.isnan(losses[4])
        assert raw(np.delete(losses, 4)) == raw(np.delete(right, 4))
        if 0 <= value < 50:
            ig.check()
        else:
            with pytest.raises(ig.IndexOutOfRangeError, match=f"indices has {value} at flat position 22; .* 0 to 49"):
                ig.check()
    bad[4, 2] = 50
    tensors = [to_torch(a) for a in (x, kept, bad)]
    with ig.debug(), pytest.raises(ig.IndexOutOfRangeError):
        ig.distillation_loss(tensors[0], tensors[1], indices=tensors[2])


AXES = (
    ((33, 1), 1),
    ((70, 3), 1),
    ((40, 255), 1),
    ((5, 4096), 0),
    ((2, 40_000), 1),
    ((3, 128, 64), 1),
    ((2, 33, 7, 5), 2),
)


@each_dtype
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_gumbel_softmax(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(4)
    for i, flavour in enumerate(FLAVOURS[: 2 if max(shape) > 10_000 else 5]):
        x, dy = (values(rng, flavour, shape, NUMPY[dtype]) for _ in range(2))
        tau, seed = (1.0, 0.5, 3.7)[i % 3], (7, 2**63 + 5)[i % 2]
        for hard, offset in ((False, 0), (False, 2**34 - 3), (True, 8), (False, 2**64 - 9)):
            check("gumbel_softmax", x, tau=tau, hard=hard, axis=axis, seed=seed, offset=offset)
        y = ig.softmax(x, axis) if i % 2 else x
        check("gumbel_softmax_backward", dy, y, tau=tau, axis=axis)


@each_dtype
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_sparsemax(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(5)
    for i, flavour in enumerate(FLAVOURS[: 2 if max(shape) > 10_000 else 5]):
        x, dy = (values(rng, flavour, shape, NUMPY[dtype]) for _ in range(2))
        for scale in (1, 2.0**-6):
            rows = (x * np.array(scale, NUMPY[dtype])).astype(NUMPY[dtype])
            check("sparsemax", rows, axis=axis)
        check("sparsemax_backward", dy, ig.sparsemax(x, axis) if i % 2 else x, axis=axis)


def test_rows_of_more_than_two_to_the_17() -> None:
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((1, 300_000)) * 0.01).astype(np.float32)
    dy = rng.standard_normal((1, 300_000)).astype(np.float32)
    check("gumbel_softmax", x, seed=3)
    y = check("sparsemax", x)
    check("sparsemax_backward", dy, y.cpu().numpy())
    check("distillation_loss", x, dy)


def test_seeds_and_temperatures_that_vary_compile_nothing_anew() -> None:
    from isograd.devices.triton_launcher import unspecialized
    from isograd.ops.gumbel_softmax.triton import gumbel_softmax_rows

    kernel = unspecialized(gumbel_softmax_rows, ("inner",))
    x = torch.randn(64, 1000, device="cuda")
    for hard in (False, True):
        ig.gumbel_softmax(x, 0.9, hard, seed=0)
    before = len(kernel.device_caches[0][0])
    assert before
    for step in range(1, 20):
        ig.gumbel_softmax(x, 1 / step, seed=2**step * 16, offset=step * 64000)
    assert len(kernel.device_caches[0][0]) == before


def test_twenty_runs_beside_other_work_give_one_result() -> None:
    x, t = (torch.randn(512, 32_000, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    other = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    found = set()
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(4):
                other = other @ other * 1e-3
        loss = ig.distillation_loss(x, t, 2.0)
        y = ig.gumbel_softmax(x, 0.5, seed=3)
        found.add((raw(loss), raw(y), raw(ig.kl_div(ig.log_softmax(x), ig.softmax(t)))))
    assert len(found) == 1


def test_empty_tensors() -> None:
    for shape in ((0, 3), (3, 0), (2, 0, 4)):
        x = torch.zeros(shape, device="cuda")
        g = torch.ones((), device="cuda")
        assert ig.kl_div(x, x, "sum") == 0
        assert ig.kl_div(x, x, "mean").isnan()
        assert (ig.distillation_loss(x, x, reduction="none") == 0).all()
        assert ig.distillation_loss(x, x, reduction="sum") == 0
        assert ig.distillation_loss_backward(g, x, x).shape == shape
        assert ig.gumbel_softmax(x, seed=0).shape == ig.sparsemax(x).shape == shape


def test_an_encoder_replays() -> None:
    x, t = (torch.randn(64, 500, device="cuda") for _ in range(2))
    with ig.Encoder("cuda") as encoder:
        losses = ig.distillation_loss(x, t, 2.0)
        y = ig.sparsemax(x)
    assert raw(losses) == raw(ig.distillation_loss(x, t, 2.0))
    x.copy_(t)
    encoder.replay()
    torch.cuda.synchronize()
    assert float(losses) == 0
    assert raw(y) == raw(ig.sparsemax(t))
