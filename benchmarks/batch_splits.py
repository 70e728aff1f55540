"""What a split of the batch changes, and what it does not: kernels, gradients added over micro-batches, ranks of DDP.

    python benchmarks/batch_splits.py

Prints the figures that the README gives for what holds and what does not hold yet. Needs torch and transformers.
"""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import isograd as ig
import isograd.torch as igt

Gradients = dict[str, torch.Tensor]


def embedding() -> None:
    generator = np.random.default_rng(0)
    x, tokens = generator.normal(size=(64, 16)).astype(np.float32), generator.integers(0, 5, 64)
    whole = ig.embedding_backward(x, tokens, 5)
    shuffled = generator.permutation(64)
    assert np.array_equal(ig.embedding_backward(x[shuffled], tokens[shuffled], 5), whole)
    halves = ig.embedding_backward(x[:32], tokens[:32], 5) + ig.embedding_backward(x[32:], tokens[32:], 5)
    print(
        f"embedding_backward, halves added beside the whole: {(halves != whole).sum()} of {whole.size} elements differ"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **sizes))


def sequences() -> torch.Tensor:
    return torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(1))


def accumulated(parts: int) -> Gradients:
    """Gradients of the mean loss of eight sequences, taken in so many micro-batches."""
    llama = model()
    with igt.use():
        for part in sequences().chunk(parts):
            (llama(part, labels=part).loss / parts).backward()
    return {name: p.grad for name, p in llama.named_parameters()}


def rank(number: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet{ranks}", rank=number, world_size=ranks)
    llama = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(llama.parameters(), 0.1)
    part = sequences().chunk(ranks)[number]
    with igt.use():
        llama(part, labels=part).loss.backward()
    optimizer.step()
    if number == 0:
        torch.save(dict(llama.module.named_parameters()), f"{folder}/weights{ranks}")
    dist.destroy_process_group()


def differing(a: Gradients, b: Gradients) -> str:
    return f"{sum(not torch.equal(a[name], b[name]) for name in a)} of {len(a)} parameters differ"


def main() -> None:
    embedding()
    whole = accumulated(1)
    print(f"Llama under use(), 1 x 8 sequences, another run: {differing(whole, accumulated(1))}")
    print(f"Llama under use(), 4 x 2 sequences beside 1 x 8: {differing(whole, accumulated(4))}")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            mp.spawn(rank, (ranks, folder), ranks)
        weights = [torch.load(f"{folder}/weights{ranks}") for ranks in (1, 2)]
    print(f"the same after a step of DDP, two ranks beside one: {differing(*weights)}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
