"""Loss curves of a small language model by order-free products beside those of bfloat16 products, seed by seed.

    python benchmarks/lm_curve.py [--device cuda] [--steps N] [--seeds N] [--seconds S] [--quick] [--json F] [--plot F]

A transformer of three layers (width 384, 6 heads, 128 bytes of context, 64 sequences a step) learns the bytes of this
repository's own text for 1,000 steps: weights in float32, autocast to bfloat16, AdamW of torch. First with torch's
products and attention, from five seeds; then from the same weights, with the same batches and with all that
`igt.use(products="int16")` computes.

A smoothed curve is the mean of the last 50 losses at each step that has as many (where there are fewer than 1,000
steps, of the last twentieth). The spread is the smallest and largest of torch's smoothed curves at a step. The verdict
is on the mean of the int16 curves: whether it lies in the spread at every step. Beside it: the share of steps at which
each curve lies in the spread of torch's (for a curve of torch's that of the others), and what int16 changes in the last
smoothed loss of the same seed.
"""

import argparse
import contextlib
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import isograd.torch as igt
from isograd.cli.bench_cuda import environment

ROOT = Path(__file__).parents[1]
LAYERS, RATE = 3, 1e-3
KINDS = ("torch", "int16")
Curve = NDArray[np.float64]


class Sizes(NamedTuple):
    """Of the model, and of the batch of a step."""

    width: int
    heads: int
    context: int
    sequences: int


LARGE, SMALL = Sizes(384, 6, 128, 64), Sizes(32, 2, 16, 4)


class Layer(nn.Module):
    """Causal attention, then two linear layers with GELU in between, each part behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.project, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(o.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        return self.head(self.norm(self.layers(self.bytes(numbers) + self.places(places))))


def read() -> bytes:
    """The text of the repository, in the order of the files' names."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    return b"\n".join(path.read_bytes() for path in sorted(paths))


def train(kind: str, seed: int, steps: int, sizes: Sizes, text: Tensor) -> dict[str, Any]:
    """A run: the loss of every step, the seconds that all took, and those of the first two, which compile kernels."""
    torch.manual_seed(seed)
    model = Model(sizes).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.1, fused=text.is_cuda)
    warm = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(steps - warm, 1))
    )
    starts = torch.randint(len(text) - sizes.context, (steps, sizes.sequences, 1)).to(text.device)
    window = torch.arange(sizes.context + 1, device=text.device)
    switch = igt.use(products="int16") if kind == "int16" else None
    losses, began, first = [], time.perf_counter(), 0.0
    for step in range(steps):
        numbers = text[starts[step] + window].long()
        with switch or contextlib.nullcontext():
            with torch.autocast(text.device.type, torch.bfloat16):
                logits = model(numbers[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), numbers[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step == 1:
            losses[0].item(), loss.item()
            first = time.perf_counter() - began
    found = [round(loss, 5) for loss in torch.stack(losses).tolist()]
    left = {} if switch is None else switch.report().not_replaced
    seconds = time.perf_counter() - began
    return {"kind": kind, "seed": seed, "seconds": seconds, "first_two": first, "left": left, "losses": found}


def smoothed(losses: list[float], window: int) -> Curve:
    """The means of all so many losses in a row."""
    total = np.concatenate(([0.0], np.cumsum(losses)))
    return (total[window:] - total[:-window]) / window


def inside(curve: Curve, others: list[Curve]) -> NDArray[np.bool_]:
    """Where a curve lies in the spread of others."""
    return (curve >= np.min(others, 0)) & (curve <= np.max(others, 0))


def judged(runs: list[dict[str, Any]], window: int) -> dict[str, Any]:
    """What the runs say: the verdict and the figures beside it."""
    curves = {(run["kind"], run["seed"]): smoothed(run["losses"], window) for run in runs}
    torchs = {seed: curve for (kind, seed), curve in curves.items() if kind == "torch"}
    int16s = {seed: curve for (kind, seed), curve in curves.items() if kind == "int16"}
    spread = list(torchs.values())
    mean = np.mean(list(int16s.values()), 0)
    outside = np.maximum(mean - np.max(spread, 0), np.min(spread, 0) - mean).max()
    changes = [float(curve[-1] - torchs[seed][-1]) for seed, curve in int16s.items()]
    others = {seed: [c for s, c in torchs.items() if s != seed] for seed in torchs} if len(torchs) > 1 else {}
    return {
        "window": window,
        "within": bool(inside(mean, spread).all()),
        "furthest_outside": max(float(outside), 0.0),
        "inside_int16": [float(inside(curve, spread).mean()) for curve in int16s.values()],
        "inside_torch_of_others": [float(inside(torchs[seed], o).mean()) for seed, o in others.items()],
        "last_torch": [float(curve[-1]) for curve in spread],
        "last_int16": [float(curve[-1]) for curve in int16s.values()],
        "change_of_a_seed": {"mean": statistics.fmean(changes), "all": changes},
        "range_of_seeds": float(np.ptp([curve[-1] for curve in spread])),
    }


def told(verdict: dict[str, Any]) -> str:
    """The verdict in words."""
    shares = [
        f"{name} {', '.join(f'{share:.0%}' for share in verdict[key])}"
        for name, key in (("int16:", "inside_int16"), ("torch, of the others:", "inside_torch_of_others"))
    ]
    change, spread = verdict["change_of_a_seed"]["mean"], verdict["range_of_seeds"]
    where = "within" if verdict["within"] else f"up to {verdict['furthest_outside']:.4f} nats outside"
    return (
        f"the mean curve of {len(verdict['last_int16'])} int16 runs lies {where} the spread of "
        f"{len(verdict['last_torch'])} bfloat16 runs\nsteps inside the spread, run by run: {'; '.join(shares)}\n"
        f"int16 changes the last loss of a seed by {change:+.4f} nats on average; seeds range over {spread:.4f}"
    )


def plot(runs: list[dict[str, Any]], verdict: dict[str, Any], path: Path) -> None:
    """Draw the smoothed curves, and how far each is from the mean of torch's."""
    from matplotlib.figure import Figure

    window = verdict["window"]
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="step", ylabel="loss, nats a byte", title=f"mean of {window} losses")
    right = figure.add_subplot(1, 2, 2, xlabel="step", ylabel="nats", title="from the mean of the bfloat16 runs")
    bases = [smoothed(run["losses"], window) for run in runs if run["kind"] == "torch"]
    center, steps = np.mean(bases, 0), np.arange(window, len(runs[0]["losses"]) + 1)
    band = {"color": "#4c72b0", "alpha": 0.2, "linewidth": 0}
    right.fill_between(steps, np.min(bases, 0) - center, np.max(bases, 0) - center, **band, label="spread, bfloat16")
    for kind, color, style in (("torch", "#4c72b0", "-"), ("int16", "#c44e52", "--")):
        curves = [smoothed(run["losses"], window) for run in runs if run["kind"] == kind]
        for i, curve in enumerate(curves):
            name = {"torch": "bfloat16", "int16": "int16, order-free"}[kind] if i == 0 else None
            left.plot(steps, curve, style, color=color, linewidth=0.8, label=name)
            right.plot(steps, curve - center, style, color=color, linewidth=0.6)
        if kind == "int16":
            right.plot(steps, np.mean(curves, 0) - center, color=color, linewidth=2, label="mean of int16")
    left.set_yscale("log")
    left.legend()
    right.legend()
    figure.savefig(path)


def main() -> None:
    """Train, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="no further int16 run begins that would end later than this")
    parser.add_argument("--quick", action="store_true", help="a small model: a try, not a comparison")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    began, sizes, data = time.perf_counter(), SMALL if args.quick else LARGE, read()
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(args.device)
    about = environment() if args.device == "cuda" else {"device": "cpu", "versions": {"torch": torch.__version__}}
    window = min(50, max(args.steps // 20, 1))
    runs: list[dict[str, Any]] = []
    for kind, seed in [(kind, seed) for kind in KINDS for seed in range(args.seeds)]:
        spent = time.perf_counter() - began
        if args.seconds and runs[-1:] and runs[-1]["kind"] == kind == "int16":
            expected = runs[-1]["seconds"] - runs[-1]["first_two"]
            if spent + expected > args.seconds:
                print(f"int16, from seed {seed} on: left out, after {spent:.0f} s", flush=True)
                break
        run = train(kind, seed, args.steps, sizes, text)
        runs.append(run)
        took = f"{run['seconds']:.1f} s, of which {run['first_two']:.1f} for two steps"
        print(f"{kind:5s} seed {seed}: last loss {run['losses'][-1]:.4f}, {took}", flush=True)
        if run["left"]:
            print(f"left to torch: {run['left']}", flush=True)
        if kind == "int16":  # what there is, should the next run be stopped
            verdict = judged(runs, window)
            if args.json:
                model = {**sizes._asdict(), "layers": LAYERS, "rate": RATE, "steps": args.steps}
                source = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                report = {"environment": about, "model": model, "text": source, "verdict": verdict, "runs": runs}
                args.json.write_text(json.dumps(report) + "\n")
            if args.plot:
                plot(runs, verdict, args.plot)
    print(told(verdict))


if __name__ == "__main__":
    main()
