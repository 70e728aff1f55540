"""A tiny transformer that is trained in several ways; runs on the ranks of a pool. The data know no ranks."""

import hashlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isograd.torch as igt

VOCABULARY, WIDTH, LENGTH, ROWS = 13, 8, 6, 2
UNITS = 8  # in a step, of all ranks


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.mix = nn.Linear(LENGTH, LENGTH, dtype=dtype)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype), nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y + self.mix(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(y)))


class Model(nn.Module):
    """Tied embeddings, a frozen parameter, blocks of two dtypes, and an expert that some units leave out."""

    def __init__(self, checkpoints: bool | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.checkpoints = checkpoints  # None, or whether they are reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.blocks = nn.ModuleList([Block(torch.float32), Block(dtype)])
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, expert: bool) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x.to(block.norm.weight.dtype)
            x = x if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
            x = x if self.checkpoints is not None else block(x)
        x = x.to(self.head.weight.dtype)
        return self.head(x + self.expert(x) if expert else x)


class Causal(nn.Module):
    """A Llama or OLMoE of transformers, of two layers."""

    def __init__(self, family: str) -> None:
        super().__init__()
        import transformers

        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "eager", "pad_token_id": 0,
        }  # fmt: skip
        if family == "olmoe":
            config = transformers.OlmoeConfig(num_experts=4, num_experts_per_tok=2, **sizes)
            self.model = transformers.OlmoeForCausalLM(config)
        else:
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        self.blocks = [*self.model.model.layers]

    def forward(self, tokens: Tensor, expert: bool) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def unit(step: int, index: int) -> tuple[Tensor, Tensor, bool]:
    random = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:], index % 3 != 1


def loss_of(model: Any, step: int, index: int, by_step: bool = False) -> Tensor:
    """The loss of a unit. by_step: the steps decide whether the expert is left out, not the units."""
    tokens, targets, expert = unit(step, index)
    if by_step:
        expert = step % 2 == 0
    device = next(model.parameters()).device
    tokens, targets = tokens.to(device), targets.to(device)
    logits = model(tokens, expert)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * LENGTH)


def device_of(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def made(
    kind: str, group: Any, checkpoints: bool | None = None, dtype: torch.dtype = torch.bfloat16, family: str = ""
) -> Any:
    torch.manual_seed(0)
    model = (Causal(family) if family else Model(checkpoints, dtype)).to(device_of(group))
    if kind.startswith("ddp"):
        options = {"find_unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
        extra = options.get(kind.removeprefix("ddp").lstrip("_"), {})
        return nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001, **extra)
    if kind.startswith("fsdp"):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = DeviceMesh.from_group(group, device_of(group), mesh=list(range(dist.get_world_size(group))))
        policy = MixedPrecisionPolicy()
        if kind == "fsdp_mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        found.update(name.removeprefix("module.").encode())
        found.update(whole(parameter).contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Momentum:
    """p -= RN(rate * m), m = RN(RN(0.9 m) + g): one rounding an operation, so that shards have the same bits."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.state = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                m.mul_(0.9)
                m.add_(p.grad)
                p.sub_(m * 0.1)
                p.grad = None


def steps_of(
    group: Any, model: Any, total: Any, optimizer: Momentum, steps: range, no_sync: bool = False, by_step: bool = False
) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = range(rank, UNITS, ranks)
    for step in steps:
        for i in own:
            with model.no_sync() if no_sync and i != own[-1] else nullcontext():
                loss_of(model, step, i, by_step).backward()
        total.finish()
        optimizer.step()


def train(
    group: Any,
    kind: str,
    steps: int = 3,
    ahead: bool = False,
    checkpoints: bool | None = None,
    by_step: bool = False,
    family: str = "",
    **settings: Any,
) -> str:
    """The digest of the weights after some steps, gradients by GradientSum."""
    model = made(kind.removesuffix("_no_sync"), group, checkpoints, family=family)
    given = {} if kind.startswith(("ddp", "fsdp")) else {"group": group}
    announced = UNITS // dist.get_world_size(group) if ahead else None
    total = igt.distributed.GradientSum(model, **given, units=announced, **settings)
    steps_of(group, model, total, Momentum(model), range(steps), kind.endswith("_no_sync"), by_step)
    return digest(model)


def train_replicas(group: Any, steps: int = 3) -> str:
    """Four ranks as two replicas of two shards: FSDP2's mesh has the shards, GradientSum's group the replicas."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank(group)
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    first = 2 * (rank // 2)
    mesh = DeviceMesh.from_group(shards[rank // 2], "cpu", mesh=[first, first + 1])
    torch.manual_seed(0)
    model = Model()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    total = igt.distributed.GradientSum(model, replicas[rank % 2], units=UNITS // 4, bucket_bytes=256)
    steps_of(group, model, total, Momentum(model), range(steps))
    return digest(model)


def train_with_torch(group: Any, steps: int = 3, family: str = "") -> str:
    """The same with the gradients that autograd and DDP add up in floats."""
    model = made("ddp_find_unused", group, family=family)
    optimizer = Momentum(model)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = range(rank, UNITS, ranks)
    for step in range(steps):
        for i in own:
            with model.no_sync() if i != own[-1] else nullcontext():
                (loss_of(model, step, i) / len(own)).backward()
        optimizer.step()
    return digest(model)


def resume(group: Any, state: Any = None, steps: tuple[int, int] = (0, 2)) -> Any:
    """(digest, everything that a run needs to go on) after some steps, from such a state or the beginning."""
    model = made("plain", group)
    total = igt.distributed.GradientSum(model, group, quantum={"embed*": -40, "*": -44}) if state is None else None
    optimizer = Momentum(model)
    if state is not None:
        total = igt.distributed.GradientSum(model, group)
        model.load_state_dict(state["model"])
        total.load_state_dict(state["total"])
        optimizer.state = [m.clone() for m in state["optimizer"]]  # what came lies in memory that ranks share
    steps_of(group, model, total, optimizer, range(*steps))
    return digest(model), {
        "model": model.state_dict(), "total": total.state_dict(), "optimizer": optimizer.state,
    }  # fmt: skip
