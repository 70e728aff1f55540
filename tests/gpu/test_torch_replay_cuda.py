"""Operators in PyTorch on a GPU, called often: a replay does what the call does."""

import threading

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from test_torch_families_cuda import CALLS, DTYPES, inputs, results_and_gradients, same_bits

import isograd as ig
import isograd.torch as igt
from isograd import cuda as cuda_kernels
from isograd.torch import replay

if (_missing := cuda_kernels.unavailable()) is not None:
    pytest.skip(f"needs a GPU: {_missing}", allow_module_level=True)

WEIGHTS = [0.25 * i for i in range(24)]


def heads(x):
    """q, k and v that lie in one another, as those of a fused projection."""
    return x[:48].reshape(1, 6, 2, 3, 32).movedim(3, 0).transpose(2, 3).unbind(0)


def attended(x, y, index, rows):
    q, k, v = heads(x)
    return igt.scaled_dot_product_attention(q, k, v, is_causal=True) + igt.attention(
        q, k, v, window=(2, 1), softcap=5.0
    )


REPLAYED = CALLS | {
    "softmax": lambda x, y, index, rows: (igt.softmax(x, -1), igt.log_softmax(y, 0)),
    "cross_entropy with weights": lambda x, y, index, rows: igt.cross_entropy(
        x, index[:, 1], torch.tensor(WEIGHTS, device=x.device, dtype=x.dtype), ignore_index=2
    ),
    "cross_entropy of sums": lambda x, y, index, rows: igt.cross_entropy(x, index[:, 1], reduction="sum"),
    "linear_cross_entropy": lambda x, y, index, rows: igt.linear_cross_entropy(x, y, rows),
    "attention": attended,
    "kl_div of one tensor": lambda x, y, index, rows: igt.kl_div(x, x, log_target=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(REPLAYED))
def test_a_replay_has_the_bits_of_the_call(name, dtype, monkeypatch):
    if name == "attention" and dtype is torch.float64:
        pytest.skip("attention takes float64 on the CPU")
    replays = 0
    original = replay._Record.__call__

    def counted(self, tensors, addresses):
        nonlocal replays
        replays += 1
        return original(self, tensors, addresses)

    monkeypatch.setattr(replay._Record, "__call__", counted)
    call = REPLAYED[name]
    for seed in range(6):
        given = [t.cuda() for t in inputs(dtype, seed=seed)]
        got = results_and_gradients(call, given)
        before = replays
        with ig.debug():  # under which nothing is replayed
            expected = results_and_gradients(call, given)
        assert replays == before
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert replays >= 4  # forward and backward of the last rounds


def test_a_replay_on_another_stream_and_thread():
    x = torch.randn(300, 40, device="cuda")
    targets = torch.randint(40, (300,), device="cuda")
    expected = [igt.cross_entropy(x * scale, targets).item() for scale in range(5)]
    found: list[float] = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for scale in range(5):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                found.append(igt.cross_entropy(x * scale, targets).item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(found) == sorted(expected * 4)


def test_bad_indices_are_reported_by_replays_in_the_name_of_the_function():
    x = torch.randn(20, 8, device="cuda")
    good, bad = torch.zeros(20, 3, dtype=torch.int64, device="cuda"), torch.full((20, 3), 9, device="cuda")
    for _ in range(3):
        igt.gather(x, 1, good)
        igt.take_along_dim(x, good, 1)
    ig.check()
    for function in (lambda: igt.gather(x, 1, bad), lambda: igt.take_along_dim(x, bad, 1)):
        function()
        with pytest.raises(ig.IndexOutOfRangeError, match="has 9 at flat position"):
            ig.check()


def test_peak_memory_of_a_replay_is_that_of_the_call():
    hidden, weight = (torch.randn(n, 256, device="cuda").requires_grad_() for n in (4096, 32000))
    targets = torch.randint(32000, (4096,), device="cuda")

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(igt.linear_cross_entropy(hidden, weight, targets), (hidden, weight))
        return torch.cuda.max_memory_allocated()

    with ig.debug():
        expected = peak()
    peaks = [peak() for _ in range(4)]
    assert max(peaks) <= expected * 1.02
