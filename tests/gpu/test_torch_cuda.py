"""PyTorch on a GPU: bits of the CPU, autograd, autocast, compile, streams, graphs, several devices, encoder."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812

import isograd as ig
import isograd.torch as igt
from isograd import DeviceMismatchError, InvalidProblemError, RecordingError, UnsupportedError
from isograd.devices import cuda as cuda_kernels
from isograd.ops.softmax import torch as family

if (_missing := cuda_kernels.unavailable()) is not None:
    pytest.skip(f"needs a GPU: {_missing}", allow_module_level=True)

KINDS = ("softmax", "log_softmax")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FORWARD = {"softmax": igt.softmax, "log_softmax": igt.log_softmax}
BACKWARD = {"softmax": igt.softmax_backward, "log_softmax": igt.log_softmax_backward}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype).to(device)


def same_bits(a, b):
    kind = INTEGERS[a.element_size()]
    return a.shape == b.shape and torch.equal(a.cpu().contiguous().view(kind), b.cpu().contiguous().view(kind))


def on_gpu(t):
    """The tensor on the GPU with the strides it has on the CPU."""
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    flat = t.as_strided((size,), (1,)).cuda()
    return flat.as_strided(t.shape, t.stride())


def views(t):
    yield t, 2
    yield t, 0
    yield t.permute(2, 0, 1), 1
    yield t[::2, 1:4, ::3], 2
    yield t[:, :1].expand(4, 5, 10), 1
    yield t[:, 2], -1
    yield t[:, :, :1], 2
    yield t[:0], 1
    yield t[1:2, 3:4, :], 0
    yield t.reshape(2, 2, 1, 3, 2, 1, 5, 2), 3
    yield t[0, 0], 0
    yield t[0, 0, 0], 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_cpu_for_every_stride(kind, dtype):
    x, dy = sample(4, 6, 10, dtype=dtype), sample(4, 6, 10, dtype=dtype, seed=1)
    x[0, 0, 3], x[1, 1, 4], x[2, 2] = float("inf"), float("nan"), -float("inf")
    for (a, dim), (b, _) in zip(views(x), views(dy), strict=True):
        y = FORWARD[kind](a, dim)
        got = FORWARD[kind](on_gpu(a), dim)
        assert got.is_cuda
        assert got.stride() == y.stride()
        assert same_bits(got, y)
        assert same_bits(BACKWARD[kind](on_gpu(b), on_gpu(y), dim), BACKWARD[kind](b, y, dim))
        assert same_bits(getattr(ig, kind)(on_gpu(a), axis=dim), y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 1000), (5, 4096), (3, 30011), (2, 131072), (1, 140001), (4, 300, 40)], ids=str)
def test_bits_of_the_cpu_for_every_length(kind, dtype, shape):
    dim = 1
    x, dy = sample(*shape, dtype=dtype), sample(*shape, dtype=dtype, seed=1)
    y = FORWARD[kind](x, dim)
    assert same_bits(FORWARD[kind](x.cuda(), dim), y)
    assert same_bits(BACKWARD[kind](dy.cuda(), y.cuda(), dim), BACKWARD[kind](dy, y, dim))
    one = torch.ones((), dtype=dtype)
    assert same_bits(BACKWARD[kind](one.cuda().expand(shape), y.cuda(), dim), BACKWARD[kind](one.expand(shape), y, dim))


def test_autograd_has_the_bits_of_the_cpu():
    for kind in KINDS:
        grads = []
        for device in ("cpu", "cuda"):
            x = sample(8, 500, device=device).requires_grad_()
            (FORWARD[kind](x, -1) * sample(8, 500, seed=1, device=device)).sum().backward()
            grads.append(x.grad)
        assert same_bits(*grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((3, 4), 0), ((2, 3, 4), 1), ((), 0)])
def test_derivatives(kind, shape, dim):
    x = sample(*shape, dtype=torch.float64, device="cuda").requires_grad_()
    assert torch.autograd.gradcheck(lambda t: FORWARD[kind](t, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda t: FORWARD[kind](t, dim), (x,))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_func(kind):
    x = sample(6, 5, dtype=torch.float64, device="cuda")

    def ours(t):
        return FORWARD[kind](t, -1)[..., 1].square().sum()

    def theirs(t):
        return getattr(torch, kind)(t, -1)[..., 1].square().sum()

    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.hessian(ours))(x), torch.func.vmap(torch.func.hessian(theirs))(x)
    )
    mapped = torch.func.vmap(lambda t: FORWARD[kind](t, 0), in_dims=1)(x)
    assert same_bits(mapped, torch.stack([FORWARD[kind](t, 0) for t in x.unbind(1)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_autocast_as_torch(kind, autocast):
    for dtype in DTYPES:
        for asked in (None, torch.float16, torch.float64):
            results = []
            for function in (FORWARD[kind], getattr(torch, kind)):
                x = sample(3, 4, dtype=dtype, device="cuda").requires_grad_()
                with torch.autocast("cuda", dtype=autocast):
                    y = function(x, -1, dtype=asked) if asked else function(x, -1)
                y.sum().backward()
                results.append((y.dtype, x.grad.dtype))
            assert results[0] == results[1], (dtype, asked)
    with torch.autocast("cuda", dtype=autocast):
        y = torch.ops.isograd.softmax(sample(3, 4, dtype=autocast, device="cuda"), -1)
    assert y.dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    x, dy = sample(3, 4, device="cuda"), sample(3, 4, seed=1, device="cuda")
    torch.library.opcheck(family.FORWARD[kind].overload, (x.clone().requires_grad_(), -1))
    torch.library.opcheck(family.FORWARD[kind].overload, (x.T, 0))
    y = FORWARD[kind](x, -1)
    torch.library.opcheck(family.BACKWARD[kind].overload, (dy.clone().requires_grad_(), y.clone().requires_grad_(), -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(kind, dynamic):
    torch._dynamo.reset()

    def step(x):
        return FORWARD[kind](x * 2, -1).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for shape in ((3, 40), (5, 40), (5, 70)):
        a, b = (sample(*shape, device="cuda").requires_grad_() for _ in range(2))
        compiled(a).backward()
        step(b).backward()
        torch.testing.assert_close(a.grad, b.grad)


def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: igt.softmax(x + 1, -1), fullgraph=True, mode="reduce-overhead")
    x = sample(16, 300, device="cuda")
    for _ in range(4):
        assert same_bits(compiled(x).clone(), igt.softmax(x + 1, -1))


def test_cuda_graphs_read_every_number_and_seed():
    def noise(x, value):
        return igt.gumbel_softmax(x, 0.1 * value, seed=value)

    def dropped(x, value):
        q = x.reshape(1, 2, 16, 16)
        return igt.attention(q, q, q, scale=0.1 * value, dropout_p=0.5, seed=value)

    def mean(x, value):
        return igt.cross_entropy(x, torch.arange(16, device="cuda"), z_loss=0.1 * value)

    x = sample(16, 32, device="cuda")
    for function in (noise, dropped, mean):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead", dynamic=True)
        for value in (3, 5, 4, 3, 7, 6, 5):
            torch.compiler.cudagraph_mark_step_begin()
            assert same_bits(compiled(x, value).clone(), function(x, value))


# --- launching -------------------------------------------------------------------------------------------------------
def test_the_plan_of_a_gpu():
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((4, 100), "bfloat16", -1), device="cuda")
    major, minor = torch.cuda.get_device_capability()
    assert f"sm_{major}{minor}" in plan.sku.arch
    assert plan.sku.backend == "triton"
    assert plan.precision_guarantee.bit_stable_across_hardware
    x = sample(4, 100, dtype=torch.bfloat16, device="cuda")
    buffer = torch.zeros(4, 200, dtype=torch.bfloat16, device="cuda")
    plan.run(x=x, y=buffer[:, ::2])
    assert same_bits(buffer[:, ::2], igt.softmax(x, -1))
    assert not buffer[:, 1::2].any()
    plan.run(x=x, y=x)
    assert same_bits(x, buffer[:, ::2])
    with pytest.raises(InvalidProblemError, match="y overlaps x in part"):
        plan.run(x=buffer[:, :100], y=buffer[:, 50:150])
    with pytest.raises(DeviceMismatchError, match="x is on cpu, y is on cuda:0; expected all on cuda"):
        plan.run(x=x.cpu(), y=x)
    with pytest.raises(DeviceMismatchError, match="dy is on cpu, y is on cuda:0"):
        ig.softmax_backward(x.cpu(), x)
    with pytest.raises(DeviceMismatchError, match="dy is on cuda:0, y is on cpu"):
        igt.softmax_backward(x, x.cpu(), -1)


def test_unsuitable_tensors():
    x = sample(2, 3, device="cuda")
    for tensor in (x.to(torch.float8_e4m3fn), x.to(torch.complex64), x.long(), x.to_sparse()):
        with pytest.raises(UnsupportedError, match=r"^softmax: input "):
            igt.softmax(tensor, -1)


def busy(stream, milliseconds=20):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * 1.5e6))


def test_other_streams():
    x, dy = sample(64, 1000, device="cuda"), sample(64, 1000, seed=1, device="cuda")
    expected = igt.softmax_backward(dy, igt.softmax(x, -1), -1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    busy(stream)
    with torch.cuda.stream(stream):
        late = x.clone()
        y = igt.softmax(late, -1)
        dx = igt.softmax_backward(dy, y, -1)
    stream.synchronize()
    assert same_bits(dx, expected)

    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((64, 1000), "float32", -1), device="cuda")
    out = torch.zeros_like(x)
    torch.cuda.synchronize()
    busy(stream)
    with torch.cuda.stream(stream):
        late = x.clone()
    plan.run(x=late, y=out, stream=stream)
    stream.synchronize()
    assert same_bits(out, igt.softmax(x, -1))
    with pytest.raises(InvalidProblemError, match=r"stream is a int; expected a torch.cuda.Stream"):
        plan.run(x=x, y=out, stream=3)


def test_no_hidden_synchronisation():
    x = sample(64, 1000, device="cuda").requires_grad_()

    def step():
        igt.log_softmax(igt.softmax(x, -1), 0).backward(torch.ones_like(x))

    step()
    encoder = ig.Encoder("cuda")
    out = torch.empty_like(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with torch.no_grad(), encoder:
            ig.softmax(x, out=out)
        encoder.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_in_a_cuda_graph():
    x, dy = sample(32, 777, device="cuda"), sample(32, 777, seed=1, device="cuda")
    igt.softmax_backward(dy, igt.softmax(x, -1), -1)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = igt.softmax(x, -1)
        dx = igt.softmax_backward(dy, y, -1)
    x.copy_(sample(32, 777, seed=2))
    graph.replay()
    assert same_bits(y, igt.softmax(sample(32, 777, seed=2), -1))
    assert same_bits(dx, igt.softmax_backward(dy, y, -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1000, 32768])
def test_equal_bits_over_a_thousand_repetitions_under_load(kind, columns):
    x, dy = (sample(16, columns, dtype=torch.bfloat16, seed=s, device="cuda") for s in (0, 1))
    y = FORWARD[kind](x, -1)
    dx = BACKWARD[kind](dy, y, -1)
    load, source = torch.cuda.Stream(), torch.zeros(1 << 27, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for repetition in range(1000):
        if repetition % 4 == 0:
            with torch.cuda.stream(load):
                target.copy_(source)
        again = FORWARD[kind](x, -1)
        different += (again.view(torch.int16) != y.view(torch.int16)).sum()
        different += (BACKWARD[kind](dy, again, -1).view(torch.int16) != dx.view(torch.int16)).sum()
    assert different.item() == 0
    assert same_bits(dx, BACKWARD[kind](dy.cpu(), FORWARD[kind](x.cpu(), -1), -1))


def test_equal_bits_over_batch_splits():
    x = sample(64, 3000, device="cuda")
    whole = igt.softmax(x, -1)
    assert same_bits(whole, torch.cat([igt.softmax(part, -1) for part in x.split(7)]))
    padded = torch.full((64, 3500), -float("inf"), device="cuda")
    padded[:, :3000] = x
    assert same_bits(whole, igt.softmax(padded, -1)[:, :3000])


def test_deterministic_mode_and_inference_mode():
    x = sample(8, 100, device="cuda").requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        igt.softmax(x, -1).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        y = igt.softmax(x, -1)
        igt.log_softmax(y, 0, out=torch.empty_like(y))
    assert y.is_inference()


# --- several devices -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_is_not_assumed():
    x, dy = sample(8, 500), sample(8, 500, seed=1)
    expected = igt.softmax_backward(dy, igt.softmax(x, -1), -1)
    assert torch.cuda.current_device() == 0
    other = x.to("cuda:1").requires_grad_()
    igt.softmax(other, -1).backward(dy.to("cuda:1"))
    assert other.grad.device.index == 1
    assert same_bits(other.grad, expected)
    with pytest.raises(DeviceMismatchError, match="dy is on cuda:0 and y on cuda:1"):
        igt.softmax_backward(x.to("cuda:0"), x.to("cuda:1"), -1)
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((8, 500), "float32", -1), device="cuda")
    with pytest.raises(DeviceMismatchError, match="x is on cuda:0, y is on cuda:1"):
        plan.run(x=x.to("cuda:0"), y=x.to("cuda:1"))
    with pytest.raises(DeviceMismatchError, match="stream belongs to cuda:0"):
        plan.run(x=x.to("cuda:1"), y=x.to("cuda:1"), stream=torch.cuda.Stream("cuda:0"))
    out = torch.empty(8, 500, device="cuda:1")
    with ig.Encoder("cuda:1") as encoder:
        ig.softmax(x.to("cuda:1"), out=out)
    encoder.replay()
    assert same_bits(out, igt.softmax(x, -1))
    with pytest.raises(DeviceMismatchError, match="the recording is for cuda:0"), ig.Encoder("cuda:0"):
        ig.softmax(x.to("cuda:1"), out=out)


# --- encoder ---------------------------------------------------------------------------------------------------------
def test_encoder_submits_once_and_replays():
    x, dy = sample(32, 2000, device="cuda"), sample(32, 2000, seed=1, device="cuda")
    dx = torch.full_like(x, 7)
    plan = ig.SoftmaxBackwardPlan.select(ig.SoftmaxBackwardDescriptor((32, 2000), "float32", -1), device="cuda")
    with ig.Encoder(device="cuda") as encoder:
        y = ig.softmax(x)
        z = igt.log_softmax(y, 0)
        plan.run(dy=dy, y=y, dx=dx)
        with pytest.raises(RecordingError, match="uses the result of softmax"):
            y.sum()
    for seed in (0, 3, 4):
        x.copy_(sample(32, 2000, seed=seed))
        encoder.replay()
        assert same_bits(y, igt.softmax(sample(32, 2000, seed=seed), -1))
        assert same_bits(z, igt.log_softmax(y, 0))
        assert same_bits(dx, igt.softmax_backward(dy, y, -1))


def test_encoder_on_shapes_that_were_never_compiled():
    x = sample(3, 1237, dtype=torch.float64, device="cuda")
    with ig.Encoder(device="cuda:0") as encoder:
        y = ig.log_softmax(x)
    assert same_bits(y, igt.log_softmax(x.cpu(), -1))
    x.neg_()
    encoder.replay()
    assert same_bits(y, igt.log_softmax(x.cpu(), -1))


def test_encoder_on_another_stream_and_inside_a_capture():
    x = sample(16, 333, device="cuda")
    with ig.Encoder(device="cuda") as encoder:
        y = ig.softmax(x)
    encoder.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    busy(stream)
    with torch.cuda.stream(stream):
        x.mul_(2)
        encoder.replay()
    stream.synchronize()
    assert same_bits(y, igt.softmax(x, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encoder.replay()
    x.mul_(-1)
    graph.replay()
    assert same_bits(y, igt.softmax(x, -1))


def test_encoder_errors():
    x, out = sample(4, 6, device="cuda"), torch.zeros(4, 6, device="cuda")
    with pytest.raises(InvalidProblemError, match="which the recording reads"), ig.Encoder("cuda"):
        ig.softmax(x, out=x)
    with pytest.raises(DeviceMismatchError, match="it runs on cuda; the encoder records for cpu"), ig.Encoder("cpu"):
        ig.softmax(x, out=out)
    with ig.Encoder("cuda") as encoder:
        ig.softmax(x, out=out)
    encoder.replay()
    x.untyped_storage().resize_(0)
    with pytest.raises(RecordingError, match="softmax: the memory of x was released or moved"):
        encoder.replay()


# --- the switch ------------------------------------------------------------------------------------------------------
def train(steps=30):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(16, 32),
            "layer": torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            "attention": torch.nn.MultiheadAttention(32, 4, batch_first=True),
            "head": torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.LogSoftmax(-1)),
        }
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(16, (8, 12), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(steps):
        hidden = model["layer"](model["embed"](words))
        hidden = hidden + model["attention"](hidden, hidden, hidden)[0]
        loss = F.nll_loss(model["head"](hidden).flatten(0, 1), words.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_a_model_inside_the_switch():
    theirs = train()
    with igt.use() as switch:
        ours = train()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    report = switch.report()
    names = ("embedding", "softmax", "log_softmax", "scaled_dot_product_attention")
    assert report.replaced == {f"torch.nn.functional.{name}": 30 for name in names} | {
        "torch.nn.functional.layer_norm": 60
    }
    assert all("order of torch's own" in line.reason for line in report.lines if not line.replaced)


# --- torch's own samples ---------------------------------------------------------------------------------------------
def test_samples_of_opinfo_have_the_bits_of_the_cpu():
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs torch's OpInfo")
    count = 0
    for op in database.op_db:
        if op.name not in KINDS:
            continue
        for dtype in DTYPES:
            for s in op.sample_inputs("cuda", dtype):
                target = s.kwargs.get("dtype", dtype)
                if target not in DTYPES:
                    continue
                for x in (
                    s.input,
                    s.input.transpose(0, -1).contiguous().transpose(0, -1) if s.input.dim() else s.input,
                ):
                    got = FORWARD[op.name](x, *s.args, **s.kwargs)
                    assert same_bits(got, FORWARD[op.name](x.cpu(), *s.args, **s.kwargs))
                    expected = op(x, *s.args, **s.kwargs)
                    eps = torch.finfo(target).eps
                    torch.testing.assert_close(got, expected, atol=eps * 32, rtol=4 * eps, equal_nan=True)
                    count += 1
    assert count > 100
