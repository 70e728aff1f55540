"""Recording on the CPU with NumPy arrays: order, submission, replay, and what is refused."""

import threading

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd import DeviceMismatchError, InvalidProblemError, RecordingError, UnsupportedError


def data(seed=0, shape=(4, 6)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_nothing_runs_before_the_block_ends():
    x, dy = data(), data(1)
    y, dx = np.full_like(x, 7), np.full_like(x, 7)
    with ig.Encoder() as encoder:
        assert ig.softmax(x, out=y) is y
        ig.softmax_backward(dy, y, out=dx)
        assert np.all(y == 7)
        assert len(encoder) == 2
        assert encoder.state == "open"
    assert encoder.state == "submitted"
    assert np.array_equal(y, ig.softmax(x))
    assert np.array_equal(dx, ig.softmax_backward(dy, y))


def test_replay_reads_the_arguments_again():
    x, dy = data(), data(1)
    y, dx = np.empty_like(x), np.empty_like(x)
    plan = ig.LogSoftmaxPlan.select(ig.LogSoftmaxDescriptor(x.shape, "float32", 0))
    with ig.Encoder("cpu") as encoder:
        plan.run(x=x, y=y)
        ig.log_softmax_backward(dy, y, axis=0, out=dx)
    x[:] = data(2)
    for _ in range(2):
        encoder.replay()
        assert np.array_equal(y, ig.log_softmax(x, axis=0))
        assert np.array_equal(dx, ig.log_softmax_backward(dy, y, axis=0))


def test_results_without_out_are_promises():
    x, dy = data(), data(1)
    with ig.Encoder() as encoder:
        y = ig.softmax(x)
        dx = ig.softmax_backward(dy, y)
        assert "result of a recording" in repr(y)
        for use in (
            lambda: y + 1,
            lambda: 1 + y,
            lambda: y[0],
            lambda: np.sum(y),
            lambda: np.exp(y),
            lambda: np.asarray(y),
            lambda: np.stack([y, y]),
            lambda: y.sum(),
            lambda: y.shape,
            lambda: len(y),
            lambda: list(y),
            lambda: y @ x.T,
            lambda: y == 1,
            lambda: y.result(),
            lambda: np.add(x, 1, out=y),
        ):
            with pytest.raises(RecordingError, match="softmax: the result was recorded but has not been computed"):
                use()
    expected = ig.softmax(x)
    assert np.array_equal(y, expected)
    assert y.result() is y.result()
    assert np.array_equal(y.result(), expected)
    assert np.array_equal(y + 1, expected + 1)
    assert np.array_equal(np.stack([y, y])[0], expected)
    assert y.shape == (4, 6)
    assert float(y[0, 0]) == expected[0, 0]
    assert np.array_equal(ig.softmax_backward(dy, y), dx.result())
    encoder.replay()


def test_an_exception_discards_the_recording():
    x = data()
    y = np.full_like(x, 7)
    encoder = ig.Encoder()
    promised = []

    def body():
        with encoder:
            promised.append(ig.softmax(x))
            ig.softmax(x, out=y)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert np.all(y == 7)
    assert encoder.state == "discarded"
    with pytest.raises(RecordingError, match="discarded"):
        encoder.replay()
    with pytest.raises(RecordingError, match="discarded"):
        promised[0].result()
    assert np.array_equal(ig.softmax(x, out=y), y)  # nothing is recorded any more


@pytest.mark.parametrize("error", ["shape", "axis", "dtype"])
def test_arguments_are_checked_when_they_are_recorded(error):
    x = data()
    bad = {
        "shape": lambda: ig.softmax(x, out=np.empty((4, 5), np.float32)),
        "axis": lambda: ig.softmax(x, axis=3),
        "dtype": lambda: ig.softmax(x, out=np.empty((4, 6))),
    }[error]
    encoder = ig.Encoder()
    with pytest.raises(ValueError, match="softmax: "), encoder:
        bad()
    assert encoder.state == "discarded"


def test_results_in_place_are_refused():
    x, y = data(), np.empty((4, 6), np.float32)
    cases = [
        lambda: ig.softmax(x, out=x),
        lambda: ig.softmax_backward(x, y, out=y),
        lambda: (ig.softmax(x, out=y), ig.softmax(data(), out=x)),  # what was read must not change
        lambda: (ig.softmax(x[:2], out=y[:2]), ig.softmax(data(shape=(1, 6)), out=x[1:2])),
        lambda: (ig.softmax(x, out=y), ig.softmax(y, out=x)),
        lambda: (ig.softmax(x, out=y), ig.softmax(y, out=y)),
    ]
    for case in cases:
        before = x.copy()
        with pytest.raises(InvalidProblemError, match="which the recording reads"), ig.Encoder():
            case()
        assert np.array_equal(x, before)
    with ig.Encoder() as encoder:  # a result may be written twice
        ig.softmax(x, out=y)
        ig.log_softmax(x, out=y)
    encoder.replay()
    assert np.array_equal(y, ig.log_softmax(x))


def test_out_of_turn():
    encoder = ig.Encoder()
    with pytest.raises(RecordingError, match="the recording is new"):
        encoder.replay()
    with encoder:
        with pytest.raises(RecordingError, match="recording already"), ig.Encoder():
            pass
        with pytest.raises(RecordingError, match="the recording is open"):
            encoder.replay()
        ig.softmax(data(), out=np.empty((4, 6), np.float32))
    with pytest.raises(RecordingError, match="records once"), encoder:
        pass
    with ig.Encoder(), pytest.raises(RecordingError, match="cannot contain another"):
        encoder.replay()
    with ig.Encoder() as empty:
        pass
    empty.replay()
    for device in ("gpu", "cuda:x", "cpu:0", None):
        with pytest.raises(InvalidProblemError, match="Encoder: device is"):
            ig.Encoder(device)


def test_an_argument_that_was_freed():
    x, y = data(), np.empty((4, 6), np.float32)
    with ig.Encoder() as encoder:
        ig.softmax(x, out=y)
    x.resize((0,), refcheck=False)
    with pytest.raises(RecordingError, match="softmax: the memory of x was released or moved"):
        encoder.replay()


def test_devices_streams_and_kinds_of_arrays():
    x, y = data(), np.empty((4, 6), np.float32)
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor(x.shape, "float32", -1))
    with pytest.raises(DeviceMismatchError, match="it runs on cpu; the encoder records for cuda"), ig.Encoder("cuda"):
        plan.run(x=x, y=y)
    with pytest.raises(InvalidProblemError, match="stream"), ig.Encoder():
        plan.run(x=x, y=y, stream=object())
    from isograd import tape

    leaf = tape.Tape().leaf(x)
    with pytest.raises(UnsupportedError, match="tape variable"), ig.Encoder():
        ig.softmax(leaf)


def test_a_recording_belongs_to_its_thread():
    x = data()
    results = []
    with ig.Encoder() as encoder:
        worker = threading.Thread(target=lambda: results.append(ig.softmax(x)))
        worker.start()
        worker.join()
        assert len(encoder) == 0
    assert np.array_equal(results[0], ig.softmax(x))


def test_arguments_are_kept_alive():
    y = np.empty((4, 6), np.float32)
    with ig.Encoder() as encoder:
        ig.softmax(data(), out=y)
    encoder.replay()
    assert np.array_equal(y, ig.softmax(data()))


def test_a_block_left_twice_or_never_entered_is_refused():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ig.RecordingError, match="new"):
        ig.Encoder().__exit__(None, None, None)
    with ig.Encoder() as encoder:
        y = np.empty_like(x)
        ig.softmax(x, out=y)
    with pytest.raises(ig.RecordingError, match="submitted"):
        encoder.__exit__(None, None, None)
    with ig.Encoder() as later:
        ig.softmax(x, out=y)
    assert len(later) == 1


def class_weight_calls(weight):
    """Recorded calls that take class weights, and a function that computes the same at once."""
    x, g = data(), data(1, (4,))
    x = x.astype(weight.dtype)
    targets, table = np.arange(4), data(2, (6, 6)).astype(weight.dtype)

    def call():
        loss = ig.cross_entropy(x, targets, weight, reduction="none")
        gradient = ig.cross_entropy_backward(g, x, targets, weight, reduction="none")
        linear = ig.linear_cross_entropy(x, table, targets, class_weight=weight, reduction="none")
        return loss, gradient, linear

    return call


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_replay_reads_class_weights_again(dtype):
    weight = np.ones(6, dtype)
    call = class_weight_calls(weight)
    with ig.Encoder() as encoder:
        promised = call()
    assert len(encoder) == 3
    for _ in range(2):
        weight[...] = np.random.default_rng(int(weight[0])).integers(1, 5, 6)
        encoder.replay()
        for found, expected in zip(promised, call(), strict=True):
            assert found.result().tobytes() == expected.tobytes()


def test_class_weights_that_a_recording_computes():
    x, targets = data().astype(np.float16), np.arange(4)
    scores = data(3, (6,)).astype(np.float16)
    with ig.Encoder() as encoder:
        weight = ig.softmax(scores)
        loss = ig.cross_entropy(x, targets, weight, reduction="none")
    for _ in range(2):
        assert np.array_equal(loss, ig.cross_entropy(x, targets, ig.softmax(scores), reduction="none"))
        scores[...] = scores[::-1].copy()
        encoder.replay()

    def overwritten():
        with ig.Encoder():
            ig.cross_entropy(x, targets, scores, reduction="none")
            ig.softmax(data(4, (6,)).astype(np.float16), out=scores)

    with pytest.raises(InvalidProblemError, match="weight, which the recording reads"):
        overwritten()
    with ig.Encoder() as encoder:
        ig.cross_entropy(x, targets, scores, reduction="none")
    scores.resize((0,), refcheck=False)
    with pytest.raises(RecordingError, match="cross_entropy: the memory of weight was released or moved"):
        encoder.replay()


def test_arrays_in_place_of_numbers_are_refused():
    x, place = data(), np.array(1)
    for call in (
        lambda: ig.top_k(x, place),
        lambda: ig.sparsemax(x, place),
        lambda: ig.segment_sum(x, np.zeros(4, int), place),
        lambda: ig.cross_entropy(x, np.zeros(4, int), ignore_index=place, reduction="none"),
        lambda: ig.softmax(x, place),
        lambda: ig.take_along_axis(x, np.zeros((4, 1), int), place),
    ):
        call()
        with pytest.raises(UnsupportedError, match=r"is a ndarray, which a recording cannot contain"), ig.Encoder():
            call()
    with ig.Encoder() as encoder:
        y = ig.top_k(x, np.int64(2)).values
    encoder.replay()
    assert y.shape == (4, 2)


def test_losses_cannot_be_accumulated_before_they_are_there():
    total, x = ig.LossAccumulator(), data()
    with ig.Encoder():
        losses = ig.cross_entropy(x, np.arange(4), reduction="none")
        with pytest.raises(UnsupportedError, match=r"LossAccumulator\.add: losses are added at once"):
            total.add(losses)
    total.add(losses)
    assert total.total() == ig.cross_entropy(x, np.arange(4), reduction="sum")
