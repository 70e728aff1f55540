"""Clipping and steps of sharded parameters on one of several ranks; prints a digest of everything on the first.

python clip_ranks.py RANK RANKS STORE
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import isograd.torch as igt

SHAPES = ((37, 5), (3, 64), (1, 9), (4000, 6))


def main(rank: int, ranks: int, store: str) -> str:
    """The digest of norms, gradients, parameters and states."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if ranks == 4:  # half of the tensors are cut in both dimensions, the others over one and copied over the other
        mesh = init_device_mesh("cpu", (2, 2))
        placements = ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()], [Shard(0), Shard(0)])
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        placements = ([Shard(0)], [Shard(1)], [Shard(0)], [Replicate()])
    rng = torch.Generator().manual_seed(0)
    found = hashlib.sha256()

    def note(tensor: torch.Tensor) -> None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def drawn(scale: float = 1.0) -> list[torch.Tensor]:
        return [scale * torch.randn(shape, generator=rng) for shape in SHAPES]

    def spread(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            distribute_tensor(t.to(dtype), mesh, where, src_data_rank=None)
            for t, where in zip(tensors, placements, strict=True)
        ]

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params = [torch.nn.Parameter(t) for t in spread(drawn(), dtype)]
        plain = torch.nn.Parameter(torch.ones(5, dtype=torch.float32))  # what every rank has of its own
        optimizer = igt.optim.AdamW([*params, plain], lr=0.01, master_weights=True)
        for scale in (1.0, 1e-3, 1e5):
            for p, g in zip(params, spread(drawn(scale), dtype), strict=True):
                p.grad = g
            plain.grad = torch.arange(5.0) * scale
            note(igt.get_total_norm([p.grad for p in params], float("inf")))
            note(igt.clip_grad_norm_([*params, plain], 1.0))
            optimizer.step()
            for p in (*params, plain):
                for tensor in (p, p.grad, *optimizer.state[p].values()):
                    note(tensor)
    params[0].grad.to_local().fill_(float("inf") if rank == 0 else 0.0)
    note(igt.get_total_norm([p.grad for p in params]))
    dist.destroy_process_group()
    return found.hexdigest()


if __name__ == "__main__":
    digest = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    if sys.argv[1] == "0":
        print(digest)
