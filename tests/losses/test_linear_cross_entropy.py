"""linear_cross_entropy: the bits of the product and cross entropy one after the other, whatever the chunk."""

import tracemalloc

import numpy as np
import pytest
from cross_entropy_problems import NUMPY, raw, work

import isograd as ig
from isograd.losses import linear_reference as reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", NUMPY)
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60


def arguments(rng, dtype, rows=7, features=5, classes=11, bias=True, weighted=True, index=np.int64):
    of = NUMPY[dtype]
    inputs = {
        "hidden": rng.standard_normal((rows, features)).astype(of),
        "weight": rng.standard_normal((classes, features)).astype(of),
        "targets": rng.integers(0, classes, rows).astype(index),
    }
    if rows > 2:
        inputs["targets"][1] = -100
    if bias:
        inputs["bias"] = rng.standard_normal(classes).astype(of)
    if weighted:
        inputs["class_weight"] = rng.random(classes).astype(work(of))
    return inputs, rng.standard_normal(rows).astype(work(of))


OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed"])
@each_dtype
def test_every_chunk_gives_the_bits_of_one_piece(dtype, options):
    rng = np.random.default_rng(40)
    for bias, weighted in ((True, True), (False, False), (True, False)):
        inputs, g = arguments(rng, dtype, bias=bias, weighted=weighted)
        expected = reference.linear_cross_entropy_gradient(g, **inputs, **options)
        assert len(expected) == 3 + bias
        for chunk in (None, 1, 3, 100):
            more = options | {"chunk": chunk, "reduction": "none"}
            got = ig.linear_cross_entropy(**inputs, **more, return_gradient=True, dloss=g)
            assert list(map(raw, got)) == list(map(raw, expected)), chunk
            assert raw(ig.linear_cross_entropy(**inputs, **more)) == raw(expected[0])


def test_the_same_from_single_operations_on_the_tape():
    inputs, _ = arguments(np.random.default_rng(41), "float32", weighted=False)
    targets = inputs.pop("targets")
    gradients, losses = [], []
    for fused in (True, False):
        tape = ig.Tape()
        h, w, b = (tape.leaf(inputs[name]) for name in ("hidden", "weight", "bias"))
        loss = ig.linear_cross_entropy(h, w, targets, b, chunk=2) if fused else ig.cross_entropy(h @ w.T + b, targets)
        found = tape.backward(loss)
        losses.append(raw(loss.value))
        gradients.append([raw(found[v]) for v in (h, w, b)])
    assert losses[0] == losses[1]
    assert gradients[0] == gradients[1]


def test_batch_and_order():
    rng = np.random.default_rng(42)
    inputs, g = arguments(rng, "bfloat16", rows=9)
    losses, dhidden, dweight, dbias = reference.linear_cross_entropy_gradient(g, **inputs)
    order = rng.permutation(9)
    moved = inputs | {"hidden": inputs["hidden"][order], "targets": inputs["targets"][order]}
    more = {"reduction": "none", "return_gradient": True}
    got = ig.linear_cross_entropy(**moved, **more, dloss=g[order])
    assert list(map(raw, got)) == [raw(losses[order]), raw(dhidden[order]), raw(dweight), raw(dbias)]
    few = inputs | {"hidden": inputs["hidden"][:4], "targets": inputs["targets"][:4]}
    got = ig.linear_cross_entropy(**few, **more, dloss=g[:4])
    assert [raw(a) for a in got[:2]] == [raw(losses[:4]), raw(dhidden[:4])]


@each_dtype
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed"])
def test_within_the_bound(dtype, options):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    inputs, g = arguments(np.random.default_rng(43), dtype, rows=12, features=30, classes=50)
    fields = (12, 30, 50, dtype, "int64", True, True, -100, options.get("label_smoothing", 0), options.get("z_loss", 0))
    plan = ig.LinearCrossEntropyGradientPlan.select(ig.LinearCrossEntropyGradientDescriptor(*fields))
    bounds = plan.precision_guarantee.error_bound(dlosses=g, **inputs, **options)
    exact = reference.oracle_linear_cross_entropy_gradient(g, **inputs, **options)
    got = ig.linear_cross_entropy(**inputs, **options, reduction="none", return_gradient=True, dloss=g)
    worst = []
    for a, b, bound in zip(got, exact, bounds, strict=True):
        error = np.abs(a.astype(np.longdouble) - b)
        assert (error <= bound).all()
        worst.append(float((error / np.where(bound > 0, bound, 1)).max()))
        assert (np.abs(a.astype(np.longdouble) * 1.1 - b) > bound).any()
    assert min(worst) > 0.003, worst
    simple = ig.LinearCrossEntropyPlan.select(ig.LinearCrossEntropyDescriptor(*fields))
    assert (simple.precision_guarantee.error_bound(**inputs, **options) == bounds[0]).all()


def test_torch_agrees():
    torch = pytest.importorskip("torch", reason="needs torch")
    inputs, _ = arguments(np.random.default_rng(44), "float64")
    leaves = {n: torch.tensor(inputs[n], requires_grad=True) for n in ("hidden", "weight", "bias")}
    logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
    w = torch.tensor(inputs["class_weight"])
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(inputs["targets"]), w, label_smoothing=0.1)
    expected.backward()
    loss, *gradients = ig.linear_cross_entropy(**inputs, label_smoothing=0.1, return_gradient=True)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-13)
    for got, leaf in zip(gradients, leaves.values(), strict=True):
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-11, atol=1e-14)
    tensors = {name: torch.tensor(a) for name, a in inputs.items()}
    again = ig.linear_cross_entropy(**tensors, label_smoothing=0.1, return_gradient=True)
    assert [raw(a.numpy()) for a in again] == [raw(a) for a in (loss, *gradients)]


def test_more_dimensions_and_reductions():
    inputs, _ = arguments(np.random.default_rng(45), "float32", rows=6)
    flat = {"return_gradient": True, "label_smoothing": 0.1}
    for reduction in ("mean", "sum", "none"):
        expected = ig.linear_cross_entropy(**inputs, **flat, reduction=reduction)
        deep = inputs | {"hidden": inputs["hidden"].reshape(2, 3, 5), "targets": inputs["targets"].reshape(2, 3)}
        loss, dhidden, *rest = ig.linear_cross_entropy(**deep, **flat, reduction=reduction)
        assert loss.shape == ((2, 3) if reduction == "none" else ())
        assert loss.tobytes() == expected[0].tobytes()
        assert raw(dhidden.reshape(6, 5)) == raw(expected[1])
        assert [raw(a) for a in rest] == [raw(a) for a in expected[2:]]


def test_no_rows_no_features_all_ignored():
    inputs, _ = arguments(np.random.default_rng(46), "float32", rows=0)
    loss, dhidden, dweight, dbias = ig.linear_cross_entropy(**inputs, reduction="sum", return_gradient=True)
    assert loss == 0
    assert dhidden.shape == (0, 5)
    assert not dweight.any()
    assert not dbias.any()
    inputs, _ = arguments(np.random.default_rng(46), "float32", features=0)
    assert np.isfinite(ig.linear_cross_entropy(**inputs))
    inputs, _ = arguments(np.random.default_rng(46), "float32")
    inputs["targets"][:] = -100
    loss, *gradients = ig.linear_cross_entropy(**inputs, reduction="sum", return_gradient=True)
    assert loss == 0
    assert not any(a.any() for a in gradients)


def test_a_chunk_is_all_that_is_held():
    rng = np.random.default_rng(47)
    rows, classes = 4096, 2000
    inputs, _ = arguments(rng, "float32", rows=rows, features=4, classes=classes, weighted=False)
    peaks = []
    for chunk in (64, rows):
        ig.linear_cross_entropy(**inputs, chunk=chunk)
        tracemalloc.start()
        ig.linear_cross_entropy(**inputs, chunk=chunk)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < peaks[1] / 10
    assert peaks[1] > 4 * rows * classes


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"weight": np.zeros((11, 6), np.float32)}, ("weight", "(11, 6)", "(classes, 5)")),
        ({"weight": np.zeros(5, np.float32)}, ("weight", "(5,)")),
        ({"weight": np.zeros((0, 5), np.float32)}, ("weight", "no rows")),
        ({"weight": np.zeros((11, 5))}, ("weight", "float64", "float32")),
        ({"targets": np.zeros(6, np.int64)}, ("targets", "(6,)", "(7,)")),
        ({"bias": np.zeros(10, np.float32)}, ("bias", "(10,)", "(11,)")),
        ({"class_weight": np.zeros(11)}, ("class_weight", "float64")),
        ({"chunk": 0}, ("chunk", "0", "positive")),
        ({"chunk": 1.5}, ("chunk", "1.5")),
        ({"reduction": "most"}, ("reduction", "'most'")),
        ({"dloss": 2.0}, ("dloss", "return_gradient")),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(changes, fragments):
    inputs, _ = arguments(np.random.default_rng(48), "float32")
    with pytest.raises(ig.InvalidProblemError) as caught:
        ig.linear_cross_entropy(**(inputs | changes))
    assert [f for f in ("linear_cross_entropy", *fragments) if f not in str(caught.value)] == [], str(caught.value)


def test_a_target_that_is_no_class():
    inputs, _ = arguments(np.random.default_rng(49), "float32")
    inputs["targets"][3] = 11
    with pytest.raises(ig.IndexOutOfRangeError, match=r"targets\[3\] is 11"):
        ig.linear_cross_entropy(**inputs)
    inputs["targets"] = inputs["targets"].astype(np.float32)
    with pytest.raises(ig.UnsupportedError, match="targets"):
        ig.linear_cross_entropy(**inputs)


def test_recorded_by_an_encoder():
    inputs, g = arguments(np.random.default_rng(40), "float32")
    inputs["hidden"] = np.stack([inputs["hidden"]] * 2)
    inputs["targets"], g = np.stack([inputs["targets"]] * 2), np.stack([g] * 2)
    with ig.Encoder() as encoder:
        hidden = ig.softmax(inputs["hidden"])
        losses = ig.linear_cross_entropy(**inputs | {"hidden": hidden}, reduction="none")
        results = ig.linear_cross_entropy(
            **inputs | {"hidden": hidden}, reduction="none", return_gradient=True, dloss=g
        )  # fmt: skip
    for _ in range(2):
        given = inputs | {"hidden": ig.softmax(inputs["hidden"])}
        expected = ig.linear_cross_entropy(**given, reduction="none", return_gradient=True, dloss=g)
        assert losses.shape == (2, 7)
        assert raw(losses.result()) == raw(expected[0])
        assert [raw(a.result()) for a in results] == [raw(b) for b in expected]
        inputs["hidden"][...] = np.random.default_rng(41).standard_normal((2, 7, 5))
        encoder.replay()
