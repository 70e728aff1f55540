"""A training step of a Llama whose bits are those of every machine, beside torch's own, in one run.

    python benchmarks/llama_step.py [--device cuda] [--quick] [--json FILE]

transformers' Llama, hidden size 4,096, 4 layers, 16,384 tokens in sequences of 2,048 and of 8,192, bfloat16, AdamW of
torch: the step of an unmodified model; with norms, gated activations, embedding, loss and attention of isograd; with
its linear layers as well, by products of 16-bit integers; and with attention by such products, which before is that of
isograd's flash kernel, whose bits are those of one kind of machine. Milliseconds are medians of whole steps.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import isograd.torch as igt
from isograd.cli.bench_cuda import environment

LARGE = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip


def build(sizes: dict[str, int], device: str, kind: str) -> tuple[Any, Any]:
    """A model, and the block that its steps run in."""
    torch.manual_seed(0)
    with torch.device(device):  # on a CPU the weights would take longer than the steps
        model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).to(torch.bfloat16).train()
    if kind == "torch":
        return model, contextlib.nullcontext()
    if kind == "order-free products and attention":
        igt.convert(model, products="int16")
        return model, igt.use(products="int16")
    igt.convert(model)
    if kind == "order-free products":
        for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            igt.convert(module, products="int16")
    return model, igt.use()


def stepper(sizes: dict[str, int], shape: tuple[int, int], device: str, kind: str) -> Callable[[], None]:
    """A function that makes one step, and waits for it."""
    model, block = build(sizes, device, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    tokens = torch.randint(sizes["vocab_size"], shape, device=device)

    def step() -> None:
        with block:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small model: a try, not a comparison")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes, shapes, rounds = (SMALL, [(2, 32)], 3) if args.quick else (LARGE, [(8, 2048), (2, 8192)], 9)
    results = []
    for shape in shapes:
        row: dict[str, Any] = {
            "sequences": f"{shape[0]} x {shape[1]:,} tokens",
            "ms": {},
            "gigabytes": {},
            "first_s": {},
        }
        print(row["sequences"])
        for kind in ("torch", "isograd, torch's products", "order-free products", "order-free products and attention"):
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step = stepper(sizes, shape, args.device, kind)
            began = time.perf_counter()
            step()
            first = time.perf_counter() - began
            step()
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
            peak = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0.0
            took = statistics.median(times) * 1e3
            row["ms"][kind], row["gigabytes"][kind], row["first_s"][kind] = took, peak, first
            ratio = took / row["ms"]["torch"]
            print(f"{kind:33s} {took:9.1f} ms, {ratio:.2f} of torch's; first {first:.1f} s; {peak:.1f} GB", flush=True)
            del step
        results.append(row)
        if args.json:
            args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
