"""igt.optim and clipping on a real GPU: the CPU's bits, CUDA graphs, and nothing that waits."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))

import isograd.torch as igt  # noqa: E402
from isograd.cli import check  # noqa: E402

KINDS = {
    "AdamW": {"lr": 0.01},
    "AdamW master": {"lr": 0.01, "master_weights": True, "maximize": True},
    "SGD": {"lr": 0.1, "weight_decay": 0.01},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
}
# A million parameters in odd sizes: whole chunks and parts, one element, none, and two launches' alignments.
SHAPES = ((1001, 301), (333_333,), (17,), (1,), (0, 3), (2048,), (2049,), (101, 103, 31), (4096, 8))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make(kind: str, params: list[torch.nn.Parameter], **options: object) -> torch.optim.Optimizer:
    return getattr(igt.optim, kind.split()[0])(params, **KINDS[kind], **options)


def on(device: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, every other one at an address that is a multiple of its element size alone."""
    made = []
    for i, t in enumerate(tensors):
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=device)
        made.append(memory[i % 2 :][: t.numel()].view(t.shape).copy_(t))
    return made


def drawn(dtype: torch.dtype, seed: int, special: bool = False) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        x = torch.randn(shape, generator=rng, dtype=torch.float64)
        if special:
            x = x * 2.0 ** torch.randint(-150, 120, shape, generator=rng)
            odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=torch.float64)
            x = torch.where(torch.rand(shape, generator=rng) < 0.1, odd[torch.randint(5, shape, generator=rng)], x)
        found.append(x.to(dtype))
    return found


def bits(t: torch.Tensor) -> bytes:
    t = t.detach().cpu().contiguous().reshape(-1)
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_cpu(kind: str, dtype: torch.dtype, special: bool) -> None:
    params = {device: [torch.nn.Parameter(t) for t in on(device, drawn(dtype, 0))] for device in ("cpu", "cuda")}
    optimizers = {device: make(kind, mine) for device, mine in params.items()}
    for step in range(1, 4):
        gradients = drawn(dtype, step, special and step == 3)
        for device, mine in params.items():
            for p, g in zip(mine, on(device, gradients), strict=True):
                p.grad = g
            optimizers[device].step()
    for p, q in zip(params["cpu"], params["cuda"], strict=True):
        assert bits(p) == bits(q), tuple(p.shape)
        ours, theirs = optimizers["cpu"].state[p], optimizers["cuda"].state[q]
        assert {k: bits(v) for k, v in ours.items()} == {k: bits(v) for k, v in theirs.items()}, tuple(p.shape)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_has_the_bits_of_the_cpu(dtype: torch.dtype, special: bool, norm_type: float) -> None:
    found = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(t) for t in on(device, drawn(dtype, 0))]
        for p, g in zip(params, on(device, drawn(dtype, 1, special)), strict=True):
            p.grad = g
        norm = igt.clip_grad_norm_(params, 0.5, norm_type)
        assert norm.device.type == device
        found.append([bits(norm), *[bits(p.grad) for p in params]])
    assert found[0] == found[1]


def test_norms_of_several_types_have_the_bits_of_the_cpu() -> None:
    given = [drawn(dtype, i)[0] for i, dtype in enumerate(DTYPES)]
    assert bits(igt.get_total_norm([t.cuda() for t in given])) == bits(igt.get_total_norm(given))


def test_published_digests() -> None:
    from test_torch_optim import published_runs

    assert dict(published_runs("cuda")) == check.published()["optimizers"]


def test_long_chunks() -> None:
    """More elements than short chunks are for; neither their order nor where they are cut leaves a trace."""
    g = torch.randn((1 << 26) + 777, device="cuda", dtype=torch.bfloat16)
    norm = igt.get_total_norm([g])
    assert bits(igt.get_total_norm([g[torch.randperm(g.numel(), device="cuda")]])) == bits(norm)
    assert bits(igt.get_total_norm([g.cpu()])) == bits(norm)
    params = [torch.nn.Parameter(torch.randn_like(g).to(device)) for device in ("cuda", "cpu")]
    params[1].data.copy_(params[0].data)
    for p in params:
        p.grad = g.to(p.device)
        igt.optim.AdamW([p]).step()
    assert bits(params[0]) == bits(params[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_the_bits_of_its_steps(kind: str) -> None:
    """Clipping and a step in a CUDA graph, the learning rate in memory; warmed up as torch wants it."""
    found = []
    for captured in (False, True):
        params = [torch.nn.Parameter(t) for t in on("cuda", drawn(torch.bfloat16, 0))]
        rate = torch.tensor(0.01, device="cuda")
        optimizer = make(kind, params)
        optimizer.param_groups[0]["lr"] = rate
        gradients = [torch.zeros_like(p) for p in params]

        def fill(step: int, into: list[torch.Tensor] = gradients) -> None:
            for t, g in zip(into, drawn(torch.bfloat16, step), strict=True):
                t.copy_(g)

        def work(params=params, gradients=gradients, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            for p, g in zip(params, gradients, strict=True):
                p.grad = g * 1.0  # memory of the graph's
            igt.clip_grad_norm_(params, 1.0)
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in (1, 2):
                fill(step)
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                work()
        for step in (3, 4, 5):
            fill(step)
            rate.fill_(0.01 / step)
            if captured:
                graph.replay()
            else:
                work()
        torch.cuda.synchronize()
        found.append([bits(p) for p in params] + [bits(v) for p in params for v in optimizer.state[p].values()])
    assert found[0] == found[1]


def test_nothing_waits() -> None:
    params = [torch.nn.Parameter(t) for t in on("cuda", drawn(torch.bfloat16, 0))]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make("AdamW master", params)
    for _ in range(2):
        igt.clip_grad_norm_(params, 1.0)
        optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        igt.clip_grad_norm_(params, 1.0)
        for p in params:
            p.grad = p.grad.clone()  # other addresses
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum"])
def test_states_go_to_torch_and_back(kind: str) -> None:
    params = [torch.nn.Parameter(t) for t in on("cuda", drawn(torch.float32, 0))]
    optimizer = make(kind, params)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = getattr(torch.optim, kind.split()[0])(theirs, **KINDS[kind], fused=True)
    for step in range(1, 4):
        for p, q, g in zip(params, theirs, drawn(torch.float32, step), strict=True):
            p.grad, q.grad = g.cuda(), g.cuda()
        optimizer.step()
        other.step()
    again = make(kind, [torch.nn.Parameter(q.detach().clone()) for q in theirs])
    again.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert {k: v.device.type for k, v in other.state[q].items()} == dict.fromkeys(other.state[q], "cuda")
    for p in again.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    again.step()
