"""Bad input to cross entropy gets an error that says what is wrong, before anything is written."""

import numpy as np
import pytest

import isograd as ig

X = np.zeros((4, 6), np.float32)
T = np.zeros(4, np.int64)


def refused(call, kind, *fragments, unchanged=()):
    before = [a.tobytes() for a in unchanged]
    with pytest.raises(ig.IsogradError) as caught:
        call()
    assert type(caught.value) is kind
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)
    assert [a.tobytes() for a in unchanged] == before


@pytest.mark.parametrize("value", [6, -1, 2**31 + 6, -(2**40)])
def test_a_target_that_is_no_class(value):
    t = np.zeros((2, 3), np.int64)
    t[1, 2] = value
    x = np.random.default_rng(0).standard_normal((2, 6, 3)).astype(np.float32)
    fragments = ("targets[1, 2]", f"is {value}", "0 to 5", "-100")
    refused(lambda: ig.cross_entropy(x, t), ig.IndexOutOfRangeError, "cross_entropy", *fragments)
    refused(
        lambda: ig.cross_entropy(x, t, return_gradient=True, out=x), ig.IndexOutOfRangeError, *fragments, unchanged=[x]
    )
    refused(
        lambda: ig.cross_entropy_backward(1.0, x, t, reduction="sum", out=x),
        *(ig.IndexOutOfRangeError, "cross_entropy", *fragments),
        unchanged=[x],
    )
    plan = ig.CrossEntropyPlan.select(ig.CrossEntropyDescriptor((2, 6, 3), "float32"))
    losses, state = np.full((2, 3), 7, np.float32), np.full((4, 2, 3), 7, np.float32)
    run = {"logits": x, "targets": t, "losses": losses, "state": state}
    refused(lambda: plan.run(**run), ig.IndexOutOfRangeError, *fragments, unchanged=[losses, state])


def test_the_ignored_target_may_be_any_integer():
    x = np.random.default_rng(1).standard_normal((3, 6)).astype(np.float32)
    for ignored, t in ((0, [0, 1, 2]), (6, [6, 1, 2]), (-1, [-1, 1, 2])):
        losses = ig.cross_entropy(x, np.array(t), ignore_index=ignored, reduction="none")
        assert losses[0] == 0
        assert (losses[1:] > 0).all()
    refused(lambda: ig.cross_entropy(x, np.array([-100, 0, 0]), ignore_index=-1), ig.IndexOutOfRangeError, "-100")


def test_unsigned_targets_above_all_classes():
    t = np.array([0, 1, 2**32 - 1, 3], np.uint32)
    refused(lambda: ig.cross_entropy(X, t), ig.IndexOutOfRangeError, "targets[2]", str(2**32 - 1))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"reduction": "avg"}, ("reduction", "'avg'", "'mean'")),
        ({"reduction": None}, ("reduction", "None")),
        ({"axis": 2}, ("axis is 2", "-2 to 1")),
        ({"axis": 0.5}, ("axis", "0.5", "integers")),
        ({"ignore_index": 1.5}, ("ignore_index", "1.5")),
        ({"label_smoothing": 1.5}, ("label_smoothing", "1.5", "0 to 1")),
        ({"label_smoothing": float("nan")}, ("label_smoothing", "nan")),
        ({"label_smoothing": "much"}, ("label_smoothing", "'much'", "number")),
        ({"z_loss": -1.0}, ("z_loss", "-1.0")),
        ({"count": "all"}, ("count", "'all'", "number")),
        ({"targets": T[:3]}, ("targets", "(3,)", "(4,)")),
        ({"targets": np.zeros((4, 6), np.int64)}, ("targets", "(4, 6)", "(4,)")),
        ({"targets": np.zeros(4, np.float32)}, ("targets has dtype float32 and shape (4,)", "uint32) of shape (4,)")),
        (
            {"targets": np.zeros(4)},
            ("targets has dtype float64 and shape (4,)", "probabilities (float32) of shape (4, 6)"),
        ),
        ({"weight": np.ones(5, np.float32)}, ("weight", "(5,)", "(6,)")),
        ({"weight": np.ones(6)}, ("weight", "float64", "float32")),
        ({"out": X.copy()}, ("out", "return_gradient")),
        ({"dloss": 1.0}, ("dloss", "return_gradient")),
        ({"return_gradient": True, "return_state": True}, ("return_gradient", "return_state")),
        ({"return_gradient": True, "dloss": np.ones(4, np.float32)}, ("dloss", "(4,)", "()")),
        ({"return_gradient": True, "dloss": np.ones(())}, ("dloss", "float64", "float32")),
        ({"logits": np.zeros((4, 0), np.float32)}, ("(4, 0)", "no class")),
        ({"logits": np.zeros((), np.float32)}, ("logits", "rank 0")),
        ({"logits": [[1.0, 2.0]]}, ("logits", "list")),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(changes, fragments):
    arguments = {"logits": X, "targets": T} | changes
    refused(lambda: ig.cross_entropy(**arguments), ig.InvalidProblemError, "cross_entropy", *fragments)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"logits": np.zeros((4, 6), np.int32)}, ("logits", "int32")),
        ({"targets": np.zeros(4, np.int16)}, ("targets", "int16", "int64")),
        ({"targets": np.zeros(4, bool)}, ("targets", "bool")),
        (
            {"targets": np.zeros((4, 6))},
            ("targets has dtype float64", "int64", "probabilities (float32) of shape (4, 6)"),
        ),
    ],
    ids=str,
)
def test_dtypes_that_nothing_serves(changes, fragments):
    arguments = {"logits": X, "targets": T} | changes
    refused(lambda: ig.cross_entropy(**arguments), ig.UnsupportedError, "cross_entropy", *fragments)


def test_outputs_that_overlap():
    base = np.zeros((5, 6), np.float32)
    refused(
        lambda: ig.cross_entropy(base[:-1], T, return_gradient=True, out=base[1:]),
        *(ig.InvalidProblemError, "cross_entropy: out overlaps logits in part"),
        unchanged=[base],
    )
    y = np.full((4, 6), 1 / 6, np.float32)
    refused(
        lambda: ig.cross_entropy(X.copy(), y, return_gradient=True, out=y),
        *(ig.InvalidProblemError, "cross_entropy: out overlaps targets"),
        unchanged=[y],
    )
    refused(
        lambda: ig.cross_entropy(X, T, return_gradient=True, out=np.zeros((4, 5), np.float32)),
        *(ig.BufferTooSmallError, "cross_entropy: out has shape (4, 5); the result has shape (4, 6)"),
    )
