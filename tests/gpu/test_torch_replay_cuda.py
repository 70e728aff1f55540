"""Operators in PyTorch on a GPU, called often: a replay does what the call does."""

import gc
import threading

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from test_torch_families_cuda import CALLS, DTYPES, inputs, results_and_gradients, same_bits

import isograd as ig
import isograd.torch as igt
from isograd.devices import cuda as cuda_kernels
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
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(igt.linear_cross_entropy(hidden, weight, targets), (hidden, weight))
        return torch.cuda.max_memory_allocated() - before

    with ig.debug():
        peak()  # the first call allocates the workspace of torch's products, which stays
        expected = peak()
    peaks = [peak() for _ in range(4)]
    assert max(peaks) <= expected * 1.02


@pytest.fixture
def replays(monkeypatch):
    """The replays so far."""
    counts = []
    original = replay._Record.__call__

    def counted(self, tensors, addresses):
        counts.append(self)
        return original(self, tensors, addresses)

    monkeypatch.setattr(replay._Record, "__call__", counted)
    return counts


def with_state(x, y, index, rows):
    loss, state = ig.cross_entropy(x, index[:, 1], return_state=True)
    return (
        loss,
        ig.cross_entropy_backward(0.5, x, index[:, 1], state=state),
        ig.cross_entropy_backward(loss, x, index[:, 1], label_smoothing=0.1),
    )


FUNCTIONS = {
    "cross_entropy": lambda x, y, index, rows: (ig.cross_entropy(x, index[:, 1], z_loss=0.1),),
    "its gradient": lambda x, y, index, rows: ig.cross_entropy(x, index[:, 1], return_gradient=True),
    "its gradient in place": lambda x, y, index, rows: ig.cross_entropy(x, index[:, 1], return_gradient=True, out=x),
    "its state": with_state,
    "linear_cross_entropy": lambda x, y, index, rows: ig.linear_cross_entropy(
        x, y, targets=rows, return_gradient=True, dloss=2.0
    ),
    "take_along_axis": lambda x, y, index, rows: (ig.take_along_axis(x[:1], index, axis=1),),
    "take_along_axis_backward": lambda x, y, index, rows: (ig.take_along_axis_backward(x, index, (1, 24), 1),),
    "scatter_sum": lambda x, y, index, rows: (ig.scatter_sum(x, index, y), ig.scatter_sum(x, rows, y, axis=0)),
    "segment_sum": lambda x, y, index, rows: (ig.segment_sum(x, rows, 50),),
    "embedding": lambda x, y, index, rows: (ig.embedding(x, rows), ig.embedding_backward(y, rows, 50, padding_idx=3)),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_of_arrays_are_replayed(name, replays):
    for seed in range(6):
        given = [t.cuda() for t in inputs(torch.bfloat16, seed=seed)]
        again = [t.clone() for t in given]
        got = FUNCTIONS[name](*given)
        before = len(replays)
        with ig.debug():
            expected = FUNCTIONS[name](*again)
        assert len(replays) == before
        assert all(same_bits(a, b) for a, b in zip((*got, *given), (*expected, *again), strict=True))
        if name == "its gradient in place":
            assert got[1] is given[0]
    assert replays
    given[0].requires_grad_()
    with pytest.raises(ig.UnsupportedError, match="requires a gradient"):
        FUNCTIONS[name](*given)


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_around_a_record_or_a_replay_changes_nothing(enabled, replays):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, weight = (torch.randn(n, 72, device="cuda", generator=generator).requires_grad_() for n in (61, 40))
    bias = torch.randn(40, device="cuda", generator=generator).requires_grad_()
    targets = torch.randint(40, (61,), device="cuda", generator=generator)
    g = torch.randn(61, device="cuda", generator=generator)
    probabilities = torch.randn(61, 40, device="cuda", generator=generator).softmax(-1)

    def gradients(autocast):
        losses = igt.linear_cross_entropy(x, weight, targets, bias, reduction="none")
        more = igt.index_add(weight, 0, targets % 40, x), igt.kl_div(probabilities, probabilities)
        with torch.autocast("cuda", torch.float16, enabled=autocast):  # also where the gradients are computed
            again = igt.index_select(x, 0, targets), igt.moe_router(x, 3, renormalize=True)[0]
            found = torch.autograd.grad((losses, *again), (x, weight, bias), (g, *[t.detach() for t in again]))
        return [t.detach() for t in (*found, *again, *more)]

    with ig.debug():
        expected = gradients(False)
    for autocast in (enabled, enabled, enabled, not enabled, enabled, not enabled):
        assert all(same_bits(a, b) for a, b in zip(gradients(autocast), expected, strict=True))
    assert replays


def test_records_of_inference_mode_serve_training(replays):
    def call(seed):
        x = torch.randn(90, 33, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed))
        targets = torch.arange(90, device="cuda") % 33
        if not torch.is_inference_mode_enabled():
            x.requires_grad_()
        loss = igt.cross_entropy(x, targets, label_smoothing=0.2, z_loss=0.1)
        y = igt.gather(igt.softmax(x, -1), 1, targets[:, None])
        if x.requires_grad:
            (loss + y.sum()).backward()
            assert x.grad is not None
        return loss, y, x.grad

    with torch.inference_mode():
        for seed in range(4):
            assert call(seed)[1].is_inference()
    before = len(replays)
    assert before
    for seed in range(4):
        got = call(seed)
        assert not got[1].is_inference()
        with ig.debug():
            expected = call(seed)
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(got, expected, strict=True))
    assert len(replays) > before


@pytest.mark.parametrize("calls_before", [1, 2, 3, 4])
def test_a_graph_may_be_captured_before_and_after_a_record(calls_before):
    x = torch.randn(70 + calls_before, 37, device="cuda")
    targets = torch.arange(len(x), device="cuda") % 37

    def call():
        loss = igt.cross_entropy(x, targets)
        return loss, igt.index_add(x, 0, targets % 5, x), igt.topk(x, 3)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls_before):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = [t.clone() for t in captured]
        eager = call()
        with ig.debug():
            expected = call()
        for found in (got, eager):
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_that_record_at_once_leave_no_mode_and_the_bits_of_the_call():
    barrier, wrong = threading.Barrier(4), []

    def work():
        for n in range(20, 60):
            x = torch.randn(n, 24, device="cuda", generator=torch.Generator(device="cuda").manual_seed(n))
            barrier.wait(60)
            results = [igt.log_softmax(x, -1) for _ in range(4)]
            wrong.extend(n for r in results if not same_bits(r, results[0]))
            if torch._C._len_torch_dispatch_stack():
                wrong.append(-n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_a_bad_index_is_found_after_a_first_call_in_inference_mode(monkeypatch):
    from isograd.core import faults

    monkeypatch.setattr(faults, "_flags", {})
    with torch.inference_mode():
        igt.embedding(torch.tensor([9, 1], device="cuda"), torch.randn(5, 8, device="cuda"))
    with pytest.raises(ig.IndexOutOfRangeError, match="embedding: input has 9 at flat position 0"):
        ig.check()
    ig.check()
