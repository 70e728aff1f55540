"""DTensors: bits of the whole for every operator, replicated or cut along axes that are treated row by row."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd.torch as igt

distributed = pytest.importorskip("torch.distributed.tensor", reason="needs torch.distributed")
Shard, Replicate = distributed.Shard, distributed.Replicate


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def sample(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


X, Q = sample(4, 6), sample(2, 2, 4, 16)
TARGETS = torch.tensor([0, 5, 2, 1])
ORDER = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
# name: (function, tensors, axes of the tensors that may be cut with that of the result; None is replicated)
CALLS = {
    "softmax": (lambda x: igt.softmax(x, -1), (X,), (0,), 0),
    "log_softmax": (lambda x: igt.log_softmax(x, 0), (X,), (1,), 1),
    "sparsemax": (lambda x: igt.sparsemax(x), (X,), (0,), 0),
    "topk": (lambda x: igt.topk(x, 2)[0], (X,), (0,), 0),
    "gather": (lambda x, i: igt.gather(x, 1, i), (X, X.argsort(1)), (0, 0), 0),
    "index_select": (lambda x, i: igt.index_select(x, 0, i), (X, TARGETS % 4), (1, None), 1),
    "index_add": (lambda x, i: igt.index_add(x, 0, i, x), (X, TARGETS % 4), (1, None), 1),
    "embedding": (lambda i, w: igt.embedding(i, w), (TARGETS % 4, X), (0, None), 0),
    "cross_entropy": (lambda x, t: igt.cross_entropy(x, t, reduction="none"), (X, TARGETS), (0, 0), 0),
    "cross_entropy_mean": (lambda x, t: igt.cross_entropy(x, t), (X, TARGETS), (0, 0), None),
    "kl_div": (lambda x: igt.kl_div(x, x, reduction="none", log_target=True), (X,), (0,), 0),
    "distillation": (lambda x: igt.distillation_loss(x, x.detach(), reduction="none"), (X,), (0,), 0),
    "router": (lambda x: igt.moe_router(x, 2)[0], (X,), (0,), 0),
    "permute": (lambda x, o: igt.moe_permute(x, o, 2), (X, ORDER), (1, None), 1),
    "attention": (lambda q: igt.attention(q, q, q, causal=True), (Q,), (0,), 0),
    "sdpa": (lambda q: igt.scaled_dot_product_attention(q, q, q), (Q,), (1,), 1),
    "gumbel_softmax": (lambda x: igt.gumbel_softmax(x, seed=3), (X,), (None,), None),
    "router_z_loss": (lambda x: igt.router_z_loss(x), (X,), (None,), None),
}


# Their gradients have the whole's size among their arguments, or are sums over rows: shards are put together for them.
GATHERED = ("topk", "gather", "embedding")


def run(function, tensors):
    given = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    result = function(*given)
    leaf = next(t for t in given if t.requires_grad)
    return result, torch.autograd.grad(result, leaf, torch.ones_like(result))[0]


def placed(axis):
    return [Replicate() if axis is None else Shard(axis)]


def shard(tensor, mesh, axis):
    """The DTensor of this rank, whose group need not exchange anything for it."""
    local = tensor if axis is None else tensor.chunk(2, axis)[mesh.get_rank()].contiguous()
    return distributed.DTensor.from_local(local, mesh, placed(axis), run_check=False)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "cut"])
def test_shards_have_the_bits_of_the_whole(mesh, name, cut):
    # The first of two ranks, whose group exchanges nothing: what it has of a result is what it computed alone.
    function, tensors, axes, result_axis = CALLS[name]
    if cut and result_axis is None:
        pytest.skip("no axis is cut")
    axes = axes if cut else (None,) * len(axes)
    given = [shard(t, mesh, axis) for t, axis in zip(tensors, axes, strict=True)]
    found, expected = run(function, given), run(function, tensors)
    assert list(found[0].placements) == placed(result_axis if cut else None)
    if cut and name in GATHERED:
        found, expected = found[:1], expected[:1]
    for part, whole in zip(found, expected, strict=True):
        (placement,) = part.placements
        if isinstance(placement, Shard):
            whole = whole.chunk(2, placement.dim)[0]
        assert torch.equal(part.to_local(), whole)


# --- two processes ---------------------------------------------------------------------------------------------------
EXCHANGED = ("softmax", "cross_entropy", "cross_entropy_mean", "attention", "embedding")


def compare_as_rank(rank, store):
    """Compare everything that two ranks make of their shards with the whole; an error ends the process."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in EXCHANGED:
        function, tensors, axes, _ = CALLS[name]
        found = run(function, [shard(t, mesh, axis) for t, axis in zip(tensors, axes, strict=True)])
        for part, whole in zip(found, run(function, tensors), strict=True):
            assert torch.equal(part.full_tensor(), whole), name
    torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs Gloo")
def test_two_processes_have_the_bits_of_one(tmp_path):
    spawned = torch.multiprocessing.get_context("spawn")
    ranks = [spawned.Process(target=compare_as_rank, args=(rank, tmp_path / "store")) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(240)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
