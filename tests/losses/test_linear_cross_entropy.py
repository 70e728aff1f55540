"""linear_cross_entropy: the bits of the product and cross entropy, whatever the chunk; by BLAS, within its bound."""

import tracemalloc

import numpy as np
import pytest
from cross_entropy_problems import NUMPY, raw, work

import isograd as ig
import isograd.core.arrays
from isograd.losses import linear_cpu
from isograd.losses import linear_reference as reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", NUMPY)
each_kernel = pytest.mark.parametrize("kernel", ["order_free", "blas"])
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
            more = options | {"chunk": chunk, "reduction": "none", "preference": "order_free"}
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
        if fused:
            loss = ig.linear_cross_entropy(h, w, targets, b, chunk=2, preference="order_free")
        else:
            loss = ig.cross_entropy(h @ w.T + b, targets)
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
    more = {"reduction": "none", "return_gradient": True, "preference": "order_free"}
    got = ig.linear_cross_entropy(**moved, **more, dloss=g[order])
    assert list(map(raw, got)) == [raw(losses[order]), raw(dhidden[order]), raw(dweight), raw(dbias)]
    few = inputs | {"hidden": inputs["hidden"][:4], "targets": inputs["targets"][:4]}
    got = ig.linear_cross_entropy(**few, **more, dloss=g[:4])
    assert [raw(a) for a in got[:2]] == [raw(losses[:4]), raw(dhidden[:4])]


def bounded(given, options, g, kernel):
    """What a kernel promises for inputs: the bounds of all results, and how the losses' plan states its own."""
    rows, features = given["hidden"].shape
    fields = (rows, features, len(given["weight"]), isograd.core.arrays.describe(given["hidden"], "", "")[1], "int64")
    fields += (
        "bias" in given,
        "class_weight" in given,
        -100,
        options.get("label_smoothing", 0),
        options.get("z_loss", 0),
    )
    plans = [
        ig.LinearCrossEntropyGradientPlan.select(ig.LinearCrossEntropyGradientDescriptor(*fields), "cpu", kernel),
        ig.LinearCrossEntropyPlan.select(ig.LinearCrossEntropyDescriptor(*fields), "cpu", kernel),
    ]
    assert [plan.kernel.name for plan in plans] == [kernel] * 2
    both, losses = (plan.precision_guarantee.error_bound for plan in plans)
    bounds = both(dlosses=g, **given, **options)
    assert (losses(**given, **options) == bounds[0]).all()
    return bounds


@each_kernel
@each_dtype
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed"])
def test_within_the_bound(dtype, options, kernel):
    if dtype == "float64" and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    inputs, g = arguments(np.random.default_rng(43), dtype, rows=12, features=30, classes=50)
    bounds = bounded(inputs, options, g, kernel)
    exact = reference.oracle_linear_cross_entropy_gradient(g, **inputs, **options)
    more = options | {"reduction": "none", "preference": kernel}
    got = ig.linear_cross_entropy(**inputs, **more, return_gradient=True, dloss=g)
    worst = []
    for a, b, bound in zip(got, exact, bounds, strict=True):
        error = np.abs(a.astype(np.longdouble) - b)
        assert (error <= bound).all()
        worst.append(float((error / np.where(bound > 0, bound, 1)).max()))
        assert (np.abs(a.astype(np.longdouble) * 1.1 - b) > bound).any()
    assert min(worst) > (0.003 if kernel == "order_free" else 1e-3), worst
    assert raw(ig.linear_cross_entropy(**inputs, **more)) == raw(got[0])


# --- products by BLAS ------------------------------------------------------------------------------------------------
def test_the_default_says_what_it_does_not_promise():
    fields = (4, 5, 6, "float32")
    for plan_type, descriptor in (
        (ig.LinearCrossEntropyPlan, ig.LinearCrossEntropyDescriptor(*fields)),
        (ig.LinearCrossEntropyGradientPlan, ig.LinearCrossEntropyGradientDescriptor(*fields)),
    ):
        fast, exact = plan_type.select(descriptor), plan_type.select(descriptor, preference="order_free")
        assert fast.kernel.name == "blas"
        g = fast.precision_guarantee
        assert g.deterministic
        assert g.bit_stable_on_same_hardware
        assert not any((g.batch_invariant, g.order_invariant, g.bit_stable_across_hardware))
        g = exact.precision_guarantee
        assert g.batch_invariant
        assert g.order_invariant
        assert g.bit_stable_across_hardware


@each_dtype
def test_chunks_blocks_and_layouts_by_blas(dtype, monkeypatch):
    # Blocks of 4 classes and chunks of 3 rows leave a rest; so do the sums over both.
    rng = np.random.default_rng(50)
    inputs, g = arguments(rng, dtype, rows=10, features=9, classes=14)
    exact = reference.oracle_linear_cross_entropy_gradient(g, **inputs)
    bounds = bounded(inputs, {}, g, "blas")
    wide = np.repeat(inputs["weight"], 2, axis=1)
    other = inputs | {"hidden": np.asfortranarray(inputs["hidden"]), "weight": wide[:, ::2]}
    for block in (4, 1 << 12):
        monkeypatch.setattr(linear_cpu, "_BLOCK", block)
        for given in (inputs, other):
            for chunk in (None, 1, 3, 10, 100):
                more = {"chunk": chunk, "reduction": "none", "preference": "blas"}
                got = ig.linear_cross_entropy(**given, **more, return_gradient=True, dloss=g)
                for a, b, bound in zip(got, exact, bounds, strict=True):
                    assert (np.abs(a.astype(np.longdouble) - b) <= bound).all(), (block, chunk)
                again = ig.linear_cross_entropy(**inputs, **more, return_gradient=True, dloss=g)
                assert list(map(raw, again)) == list(map(raw, got))
                losses = ig.linear_cross_entropy(**given, **more)
                assert (np.abs(losses.astype(np.longdouble) - exact[0]) <= bounds[0]).all()


@each_dtype
def test_outputs_of_any_layout_by_blas(dtype):
    inputs, g = arguments(np.random.default_rng(51), dtype, rows=6)
    descriptor = ig.LinearCrossEntropyGradientDescriptor(6, 5, 11, dtype, "int64", True, True, chunk=4)
    plan = ig.LinearCrossEntropyGradientPlan.select(descriptor, preference="blas")
    shapes = {"dhidden": (6, 5), "dweight": (11, 5)}
    of, results = NUMPY[dtype], []
    for order, step in (("C", 1), ("F", 1), ("C", 2)):
        out = {name: np.empty((n, step * m), of, order)[:, ::step] for name, (n, m) in shapes.items()}
        out |= {"losses": np.empty(12, work(of))[::2], "dbias": np.empty(22, of)[::-2]}
        plan.run(dlosses=g, **inputs, **out)
        results.append([raw(out[name]) for name in sorted(out)])
    assert results[0] == results[1] == results[2]


@each_dtype
def test_special_values_by_blas(dtype):
    inputs, g = arguments(np.random.default_rng(52), dtype, rows=8, weighted=False)
    inputs["hidden"][2, 1] = np.inf
    inputs["hidden"][4, 0], inputs["targets"][4] = np.nan, -100
    inputs["hidden"][5, 3] = np.nan
    with np.errstate(all="ignore"):
        expected = reference.linear_cross_entropy_gradient(g, **inputs)
        more = {"reduction": "none", "return_gradient": True, "dloss": g, "chunk": 3, "preference": "blas"}
        got = ig.linear_cross_entropy(**inputs, **more)
    for a, b in zip(got, expected, strict=True):
        assert (np.isnan(a) == np.isnan(b)).all()
        assert np.isnan(a).any()
        canonical = np.array(np.nan, a.dtype).tobytes()
        assert {value.tobytes() for value in a[np.isnan(a)]} == {canonical}
    assert got[0][4] == 0


def test_half_precision_is_added_up_in_float32_by_blas():
    # 4,096 classes of one weight: a sum of 16-bit partial sums would stop growing at 2,048 ulp.
    rows, classes = 4096, 3
    hidden, weight = np.ones((rows, 1), np.float16), np.zeros((classes, 1), np.float16)
    targets = np.zeros(rows, np.int64)
    g = np.ones(rows, np.float32)
    more = {"reduction": "none", "return_gradient": True, "dloss": g, "preference": "blas"}
    for chunk in (None, 1, 1000):
        _, _, dweight = ig.linear_cross_entropy(hidden, weight, targets, chunk=chunk, **more)
        np.testing.assert_allclose(dweight[:, 0].astype(float), rows * (1 / 3 - np.eye(3)[0]), rtol=2**-10)


@pytest.mark.parametrize(
    ("preference", "error", "fragment"),
    [("fastest", ig.UnsupportedError, "'order_free'"), (7, ig.InvalidProblemError, "preference is 7")],
)
def test_a_kernel_that_is_not_there(preference, error, fragment):
    inputs, _ = arguments(np.random.default_rng(53), "float32")
    with pytest.raises(error, match=fragment):
        ig.linear_cross_entropy(**inputs, preference=preference)


def test_the_tape_and_torch_take_a_preference():
    inputs, _ = arguments(np.random.default_rng(54), "float32", weighted=False)
    targets, results = inputs.pop("targets"), {}
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    for kernel in ("order_free", "blas"):
        more = {"preference": kernel, "label_smoothing": 0.1}
        plain = ig.linear_cross_entropy(**inputs, targets=targets, **more, return_gradient=True)
        tape = ig.Tape()
        leaves = [tape.leaf(inputs[name]) for name in ("hidden", "weight", "bias")]
        loss = ig.linear_cross_entropy(*leaves[:2], targets, leaves[2], **more)
        found = tape.backward(loss)
        assert [raw(loss.value), *(raw(found[v]) for v in leaves)] == list(map(raw, plain))
        tensors = [torch.tensor(inputs[name], requires_grad=True) for name in ("hidden", "weight", "bias")]
        value = igt.linear_cross_entropy(*tensors[:2], torch.tensor(targets), tensors[2], **more)
        value.backward()
        assert [raw(value.detach().numpy()), *(raw(t.grad.numpy()) for t in tensors)] == list(map(raw, plain))
        results[kernel] = plain
    for a, b in zip(*results.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# --- both ------------------------------------------------------------------------------------------------------------
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


@each_kernel
def test_a_chunk_is_all_that_is_held(kernel):
    rng = np.random.default_rng(47)
    rows, classes = 4096, 2000
    inputs, _ = arguments(rng, "float32", rows=rows, features=4, classes=classes, weighted=False)
    peaks = []
    for chunk in (64, rows):
        ig.linear_cross_entropy(**inputs, chunk=chunk, preference=kernel)
        tracemalloc.start()
        ig.linear_cross_entropy(**inputs, chunk=chunk, preference=kernel)
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
