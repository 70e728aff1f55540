"""Recording with tensors on the CPU."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd import DeviceMismatchError, InvalidProblemError, RecordingError, UnsupportedError


def data(seed=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def test_record_submit_replay():
    x, dy = data(), data(1)
    dx = torch.zeros(4, 6)
    version = dx._version
    with ig.Encoder() as encoder:
        y = ig.softmax(x)
        z = igt.log_softmax(y, 0)
        igt.softmax_backward(dy, y, -1, out=dx)
        assert dx.data_ptr()
        assert dx.shape == (4, 6)
    assert dx._version > version
    for _ in range(2):
        assert torch.equal(y, igt.softmax(x, -1))
        assert torch.equal(z, igt.log_softmax(y, 0))
        assert torch.equal(dx, igt.softmax_backward(dy, y, -1))
        x.copy_(data(2))
        encoder.replay()


def test_a_result_feeds_the_next_function_of_the_library():
    x = data()
    with ig.Encoder() as encoder:
        y = ig.softmax(x)
        z = ig.log_softmax(y, 0)
        losses = ig.cross_entropy(y, torch.tensor([0, 1, 5, 2]), reduction="none")
    assert len(encoder) == 3
    assert torch.equal(z, ig.log_softmax(y, 0))
    assert torch.equal(losses, ig.cross_entropy(y, torch.tensor([0, 1, 5, 2]), reduction="none"))


def test_zero_dimensions():
    x, out = torch.tensor(3.0), torch.tensor(5.0)
    with ig.Encoder() as encoder:
        igt.softmax(x, 0, out=out)
        y = igt.log_softmax(x, -1)
    assert (out, y) == (1, 0)
    encoder.replay()


def test_a_result_may_not_be_used_before_it_is_there():
    x, out = data(), torch.zeros(4, 6)
    half = out[:2]
    with ig.Encoder():
        y = ig.softmax(x)
        ig.softmax(x, out=out)
        for use in (
            lambda: y + 1,
            lambda: y[0],
            lambda: y.sum(),
            lambda: torch.stack([x, y]),
            lambda: y.numpy(),
            lambda: y.tolist(),
            lambda: float(y[0, 0]),
            lambda: repr(y),
            lambda: y.clone(),
            lambda: torch.mul(x, 2, out=out),
            lambda: half.sum(),
            lambda: torch.softmax(out, -1),
        ):
            with pytest.raises(RecordingError, match="uses the result of softmax, which was recorded"):
                use()
        assert (y.shape, y.dtype, y.stride(), torch.empty_like(y).shape) == (x.shape, x.dtype, x.stride(), x.shape)
        x.sum()  # everything else is as usual
    assert torch.equal(y, out)
    assert torch.equal(half, y[:2])


def test_an_exception_discards():
    x, out = data(), torch.zeros(4, 6)

    def body():
        with ig.Encoder():
            ig.softmax(x, out=out)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert torch.equal(out, torch.zeros(4, 6))
    assert out.sum() == 0


def test_an_argument_that_was_freed():
    x, out = data(), torch.zeros(4, 6)
    with ig.Encoder() as encoder:
        ig.softmax(x, out=out)
    encoder.replay()
    x.untyped_storage().resize_(0)
    with pytest.raises(RecordingError, match="softmax: the memory of x was released or moved"):
        encoder.replay()
    out.data = torch.zeros(4, 6)
    with pytest.raises(RecordingError, match="released or moved"):
        encoder.replay()
    x = data()
    encoder = ig.Encoder().__enter__()
    ig.softmax(x, out=torch.zeros(4, 6))
    x.untyped_storage().resize_(0)
    with pytest.raises(RecordingError, match="released or moved"):
        encoder.__exit__(None, None, None)
    assert encoder.state == "discarded"


def test_what_a_recording_cannot_contain():
    x = data()
    with pytest.raises(InvalidProblemError, match="which the recording reads"), ig.Encoder():
        ig.softmax(x, out=x)
    with pytest.raises(UnsupportedError, match="not recorded by an encoder"), ig.Encoder():
        igt.softmax(x.clone().requires_grad_(), -1)
    with pytest.raises(UnsupportedError, match="contains no conversion"), ig.Encoder():
        igt.softmax(x, -1, dtype=torch.float64)
    with (
        pytest.raises(DeviceMismatchError, match="it runs on cpu; the encoder records for cuda:1"),
        ig.Encoder("cuda:1"),
    ):
        igt.softmax(x, -1)
    with torch.no_grad(), ig.Encoder():
        y = igt.softmax(x.clone().requires_grad_(), -1)
    assert torch.equal(y, igt.softmax(x, -1))


def test_operators_run_at_once():
    x = data()
    with ig.Encoder() as encoder:
        y = torch.ops.isograd.softmax(x, -1)
        assert torch.equal(y, torch.ops.isograd.softmax(x, -1))
    assert len(encoder) == 0
