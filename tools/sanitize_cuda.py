"""Run every GPU kernel on small problems: what `compute-sanitizer` is to watch.

    compute-sanitizer --tool racecheck python tools/sanitize_cuda.py [--operation NAME ...] [--part I/N]

The cases of `isograd verify`, and rows and strips for the kernels that those are too short for. Results are not
compared; `isograd verify` does that. What may be reported: initcheck does not see what cuBLAS writes through the copy
engine, the logits of linear_cross_entropy, nor the tensor descriptors that attention's programs make; racecheck does
not follow the mbarriers between warps of Hopper's attention, and reports what they order.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from isograd.cli.check import Runner
from isograd.cli.devices import DEVICES
from isograd.cli.suites import SUITES, cases
from isograd.core import registry
from isograd.core.cases import Case, normal, store
from isograd.errors import UnsupportedError

MOST_ELEMENTS = 1 << 21
CASES = 5

# Rows that are staged, shared by a cluster or by several of its blocks, more of them than clusters; strips.
LONG: list[tuple[tuple[int, ...], int]] = [
    ((160, 8192), 1),
    ((150, 16_384), 1),
    ((40, 32_768), 1),
    ((40, 65_536), 1),
    ((20, 131_072), 1),
    ((2, 4096, 64), 1),
    ((2, 2048, 64), 1),
    ((2, 1024, 64), 1),
    ((2, 512, 64), 1),
    ((2, 256, 64), 1),
    ((3, 1_050_000), 1),
]


def chosen(operation: str, dtype: str) -> list[Case]:
    """Some of verify's cases, from the smallest to the largest."""
    sizes = [(sum(a.size for a in case.inputs.values()), i, case) for i, case in enumerate(cases(operation, dtype))]
    ordered = [case for size, _, case in sorted(sizes, key=lambda s: s[:2]) if size <= MOST_ELEMENTS]
    steps = np.unique(np.linspace(0, len(ordered) - 1, CASES).round().astype(int))
    return [ordered[i] for i in steps]


def long_rows(operation: str, dtype: str) -> Iterator[Case]:
    """Problems of the kernels for long rows."""
    if operation.removesuffix("_backward") in ("softmax", "log_softmax"):
        for shape, axis in LONG:
            x = store(normal(shape, 1), dtype)
            inputs = {"dy": x, "y": x} if operation.endswith("backward") else {"x": x}
            yield Case(f"{shape}", inputs, {"axis": axis})
    elif operation == "cross_entropy_gradient":
        for shape, axis in LONG[1:5]:
            work = np.float64 if dtype == "float64" else np.float32
            targets = np.arange(shape[0], dtype=np.int64) * 37 % shape[1]
            inputs = {"dlosses": np.ones(shape[0], work), "logits": store(normal(shape, 1), dtype), "targets": targets}
            yield Case(f"{shape}", inputs, {"axis": axis})


def main() -> None:
    """Run a part of the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", nargs="*", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--part", default="0/1", help="I/N: only every Nth kernel, from the Ith on")
    arguments = parser.parse_args()
    index, count = map(int, arguments.part.split("/"))
    entries = [e for e in registry.kernels() if e.device == "cuda" and e.operation in arguments.operation]
    ran = 0
    for entry in entries[index::count]:
        run = Runner(SUITES[entry.operation], entry, DEVICES["cuda"])
        for case in (*chosen(entry.operation, entry.dtype), *long_rows(entry.operation, entry.dtype)):
            try:
                run(case)
                ran += 1
            except UnsupportedError:
                continue
    torch.cuda.synchronize()
    print(f"{len(entries[index::count])} kernels, {ran} problems")


if __name__ == "__main__":
    main()
