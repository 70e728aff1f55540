"""Times of calls on a GPU, for the scripts that measure single kernels."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
HEAD_START = 1_000_000  # cycles, some half a millisecond


def measure(calls: dict[str, Call], rounds: int = 15, least: float = 0.4) -> dict[str, float]:
    """Median milliseconds of every call; those that fail are left out."""
    calls = dict(calls)
    for name in list(calls):
        try:
            for _ in range(2):
                calls[name]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name}: {error!r}"[:200])
            del calls[name]
    noise = torch.zeros(64 << 20, device="cuda")  # 256 MB, several times the L2 cache
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, begin, turn = list(calls), time.monotonic(), 0
    while turn < rounds or (time.monotonic() - begin < least and turn < 60):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            noise.sum()  # leaves nothing in the cache that would have to be written back
            torch.cuda._sleep(HEAD_START)  # the host prepares the launches meanwhile: times are the device's
            start.record()
            calls[name]()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
        turn += 1
    return {name: statistics.median(t) for name, t in times.items()}


def graphed(call: Call) -> Call:
    """The call as a CUDA graph, captured when it first runs, so that the time is the device's alone."""
    graphs: list[torch.cuda.CUDAGraph] = []

    def run() -> None:
        if not graphs:
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graphs.append(graph)
        graphs[0].replay()

    return run
