"""Indexing, routing and losses in PyTorch on a GPU: bits of the CPU, graphs, autocast, compile, faults, devices."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812

import isograd as ig
import isograd.torch as igt
from isograd.devices import cuda as cuda_kernels

if (_missing := cuda_kernels.unavailable()) is not None:
    pytest.skip(f"needs a GPU: {_missing}", allow_module_level=True)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a, b):
    if not a.is_floating_point():
        return torch.equal(a.cpu(), b.cpu())
    kind = INTEGERS[a.element_size()]
    return a.shape == b.shape and torch.equal(a.cpu().contiguous().view(kind), b.cpu().contiguous().view(kind))


def inputs(dtype, tokens=50, classes=24, seed=0):
    """Tensors x and y [tokens, classes], indices of the same shape and a vector of rows, both with many repetitions."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(tokens, classes, generator=generator).to(dtype) for _ in range(2))
    index = torch.randint(classes, (tokens, classes), generator=generator) // 3
    rows = torch.randint(tokens, (tokens,), generator=generator) // 5
    return x, y, index, rows


def mixture(x, y, index, rows):
    weights, experts = igt.moe_router(x, 4, renormalize=True)
    order, _ = igt.expert_permutation(experts, x.shape[1])
    out = igt.moe_combine(igt.moe_permute(y, order, 4) * 2, weights, order)
    balance = igt.load_balancing_loss(igt.softmax(x, -1), experts)
    return out, balance, igt.router_z_loss(x), igt.expert_counts(experts, x.shape[1])


# Results of (x, y, index, rows), which are differentiated with respect to x and y.
CALLS = {
    "gather": lambda x, y, index, rows: igt.gather(x, 1, index),
    "take_along_dim": lambda x, y, index, rows: igt.take_along_dim(x[:1], index, 1),
    "scatter_add": lambda x, y, index, rows: igt.scatter_add(x, 1, index, y),
    "scatter_add of dim 0": lambda x, y, index, rows: igt.scatter_add(x, 0, index, y),
    "index_select": lambda x, y, index, rows: igt.index_select(x, 0, rows),
    "index_add": lambda x, y, index, rows: igt.index_add(x, 0, rows, y, alpha=0.5),
    "embedding": lambda x, y, index, rows: igt.embedding(rows, x, padding_idx=3),
    "topk": lambda x, y, index, rows: igt.topk(x, 5),
    "mixture": mixture,
    "cross_entropy": lambda x, y, index, rows: igt.cross_entropy(x, index[:, 0], label_smoothing=0.1, z_loss=0.01),
    "cross_entropy of probabilities": lambda x, y, index, rows: igt.cross_entropy(x, y.detach(), reduction="none"),
    "kl_div": lambda x, y, index, rows: igt.kl_div(x, y.abs() + 0.125, reduction="batchmean"),
    "distillation_loss": lambda x, y, index, rows: igt.distillation_loss(x, y.detach(), 2.0),
    "gumbel_softmax": lambda x, y, index, rows: igt.gumbel_softmax(x, 0.5, True, seed=7, offset=3),
    "sparsemax": lambda x, y, index, rows: igt.sparsemax(x, 0),
}


def results_and_gradients(call, given):
    """Everything that a call returns, and the gradients of x and y for gradients that do not depend on the device."""
    x, y, index, rows = given
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    results = call(x, y, index, rows)
    results = results if isinstance(results, tuple) else (results,)
    floats = [r for r in results if r.requires_grad]
    gradients = [
        torch.randn(r.shape, generator=torch.Generator().manual_seed(i)).to(r.dtype).to(r.device)
        for i, r in enumerate(floats)
    ]
    leaves = torch.autograd.grad(floats, (x, y), gradients, allow_unused=True)
    return [r.detach() for r in results] + [g for g in leaves if g is not None]


@pytest.fixture(params=sorted(CALLS))
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_have_the_bits_of_the_cpu(call, dtype):
    given = inputs(dtype)
    expected = results_and_gradients(call, given)
    got = results_and_gradients(call, [t.cuda() for t in given])
    assert all(t.is_cuda for t in got)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_repeated_runs_have_the_same_bits(call):
    given = [t.cuda() for t in inputs(torch.float32, tokens=2000)]
    first = results_and_gradients(call, given)
    for _ in range(10):
        assert all(same_bits(a, b) for a, b in zip(results_and_gradients(call, given), first, strict=True))


def test_a_cuda_graph_replays_forward_and_backward(call):
    given = [t.cuda() for t in inputs(torch.float32)]
    others = [t.cuda() for t in inputs(torch.float32, seed=1)]

    def run():
        x, y = (t.detach().requires_grad_() for t in given[:2])
        results = call(x, y, *given[2:])
        results = results if isinstance(results, tuple) else (results,)
        total = sum(r.float().square().sum() for r in results if r.requires_grad)
        return [g for g in torch.autograd.grad(total, (x, y), allow_unused=True) if g is not None]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles the kernels
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for target, value in zip(given, others, strict=True):
        target.copy_(value)
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(captured, run(), strict=True))


def test_compile(call):
    torch._dynamo.reset()

    def step(x, y, index, rows):
        results = call(x * 2, y, index, rows)
        return results if isinstance(results, tuple) else (results,)

    given = [t.cuda() for t in inputs(torch.float32)]
    got, expected = torch.compile(step, fullgraph=True)(*given), step(*given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_gives_the_types_of_torch(autocast, dtype):
    x, y, index, rows = (t.cuda() for t in inputs(dtype))
    p = y.abs() + 0.1
    wider = x if dtype is torch.float64 else x.float()  # torch leaves float64 as it is
    pairs = (
        (lambda: igt.cross_entropy(x, rows % 24), lambda: F.cross_entropy(x, rows % 24)),
        (lambda: igt.kl_div(x, p, reduction="sum"), lambda: F.kl_div(x, p, reduction="sum")),
        (lambda: igt.gather(x, 1, index), lambda: torch.gather(x, 1, index)),
        (lambda: igt.scatter_add(wider, 1, index, y), lambda: torch.scatter_add(wider, 1, index, y)),
        (lambda: igt.embedding(rows, x), lambda: F.embedding(rows, x)),
        (lambda: igt.topk(x, 3).values, lambda: torch.topk(x, 3).values),
    )
    with torch.autocast("cuda", dtype=autocast):
        for ours, theirs in pairs:
            assert ours().dtype is theirs().dtype


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_linear_cross_entropy_under_autocast_is_linear_and_cross_entropy(autocast, kinds):
    x, y, _, rows = (t.cuda() for t in inputs(torch.float32, 50, 24))
    targets = rows % 50
    leaves = [t.to(kind).requires_grad_() for t, kind in zip((x, y), kinds, strict=True)]
    with torch.autocast("cuda", dtype=autocast):
        loss = igt.linear_cross_entropy(*leaves, targets)
        theirs = F.cross_entropy(F.linear(*leaves), targets)
    assert loss.dtype is theirs.dtype is torch.float32
    assert same_bits(loss, igt.linear_cross_entropy(*(t.detach().to(autocast) for t in leaves), targets))
    ours, theirs = (torch.autograd.grad(1024 * result, leaves) for result in (loss, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert (a.float() - b.float()).norm() < 0.02 * b.float().norm()


@pytest.mark.parametrize("tokens", [8192, 65536])
def test_a_scaled_loss_of_halves_has_the_gradients_of_losses_of_rows(tokens):
    generator = torch.Generator().manual_seed(4)
    hidden, matrix = torch.randn(tokens, 64, generator=generator), torch.randn(1000, 64, generator=generator)
    targets = torch.randint(1000, (tokens,), generator=generator).cuda()
    leaves = [t.half().cuda().requires_grad_() for t in (hidden, matrix / 8)]
    got = torch.autograd.grad(igt.linear_cross_entropy(*leaves, targets) * 32768, leaves)
    rows = igt.linear_cross_entropy(*leaves, targets, reduction="none")
    for a, b in zip(got, torch.autograd.grad(rows, leaves, torch.full_like(rows, 32768 / tokens)), strict=True):
        assert same_bits(a, b)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = F.cross_entropy(exact[0] @ exact[1].T, targets) * 32768
    for a, b in zip(got, torch.autograd.grad(wide, exact), strict=True):
        assert (a - b).norm() < 2e-3 * b.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_a_count_in_a_tensor_is_not_waited_for(place, dtype):
    x, y, _, rows = (t.cuda() for t in inputs(dtype))
    targets = rows % 24
    counts = [torch.tensor(37, device=place), torch.tensor(37.0, device=place)]

    def results(count):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        losses = (
            igt.cross_entropy(leaves[0], targets, count=count),
            igt.linear_cross_entropy(leaves[0], leaves[1][:24], targets, count=count),
        )
        return *losses, *torch.autograd.grad([loss.float() for loss in losses], leaves)

    expected = results(37)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [results(count) for count in counts]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got in found:
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(ig.DeviceMismatchError, match="cross_entropy: count is on cuda"):
        igt.cross_entropy(x.cpu(), targets.cpu(), count=torch.tensor(3, device="cuda"))
    assert same_bits(ig.cross_entropy(x, targets, count=counts[0]), ig.cross_entropy(x, targets, count=37))
    total = ig.LossAccumulator("float32")
    total.add(torch.ones(4, device="cuda"))
    assert total.mean(torch.tensor(8, device=place)) == 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_a_number_have_the_bits_of_the_cpu(dtype):
    x, _, _, _ = inputs(dtype)
    for y in (x, x.T, x[:, ::2], x[0, 0], x[:0]):
        for factor in (0.3, 1e-6, 65536.0):
            given = torch.tensor(factor, dtype=torch.float64)
            scaled = torch.ops.isograd.scaled
            assert same_bits(scaled(y.cuda(), given.cuda()), scaled(y, given))


def test_an_index_out_of_range_gives_nan_there_and_check_says_where():
    x = torch.zeros(4, 5, device="cuda", requires_grad=True)
    for bad in (
        lambda: igt.gather(x, 1, torch.tensor([[0, 5], [1, 2], [0, 0], [0, 0]], device="cuda")),
        lambda: igt.index_select(x, 0, torch.tensor([4, 1], device="cuda")),
        lambda: igt.embedding(torch.tensor([-1, 2], device="cuda"), x),
        lambda: igt.cross_entropy(x, torch.tensor([0, 1, 5, 2], device="cuda"), reduction="none"),
    ):
        result = bad()
        assert result.isnan().any()
        assert not result.isnan().all()
        with pytest.raises(ig.IndexOutOfRangeError):
            ig.check()
        ig.check()  # once is enough
    with ig.debug(), pytest.raises(ig.IndexOutOfRangeError):
        igt.gather(x, 1, torch.full((4, 1), 7, device="cuda"))


def test_mixed_devices():
    x, y, index, rows = inputs(torch.float32)
    for wrong in (
        lambda: igt.gather(x.cuda(), 1, index),
        lambda: igt.scatter_add(x.cuda(), 1, index.cuda(), y),
        lambda: igt.embedding(rows.cuda(), x),
        lambda: igt.cross_entropy(x.cuda(), rows),
        lambda: igt.moe_router(x.cuda(), 2, bias=torch.zeros(24)),
        lambda: igt.kl_div(x.cuda(), y),
    ):
        with pytest.raises(ig.DeviceMismatchError, match="cuda:0"):
            wrong()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu(call):
    given = inputs(torch.float32)
    got = results_and_gradients(call, [t.to("cuda:1") for t in given])
    assert all(t.device.index == 1 for t in got)
    assert all(same_bits(a, b) for a, b in zip(got, results_and_gradients(call, given), strict=True))


def test_an_unmodified_model_with_experts_in_the_switch():
    def step():
        generator = torch.Generator().manual_seed(0)
        table, gate = (torch.randn(s, generator=generator).cuda().requires_grad_() for s in ((50, 16), (16, 8)))
        words = torch.randint(50, (64,), generator=generator).cuda()
        x = F.embedding(words, table)
        weights, experts = torch.softmax(x @ gate, -1).topk(2)
        out = torch.zeros_like(x)
        for e in range(8):
            token, slot = (experts == e).nonzero(as_tuple=True)
            out.index_add_(0, token, x[token] * weights[token, slot, None] * (e + 1))
        loss = F.cross_entropy(out @ table.T, words)
        loss.backward()
        return loss.detach(), table.grad, gate.grad

    expected = step()
    with igt.use() as switch:
        first, second = step(), step()
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert switch.report().replaced["torch.Tensor.index_add_"] == 16
    assert switch.report().not_replaced.keys() == {"torch.Tensor.matmul", "torch.Tensor.__getitem__"}
