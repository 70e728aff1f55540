"""How far softmax and log_softmax are off, in units in the last place: isograd beside PyTorch and NumPy.

    python benchmarks/accuracy.py [--output benchmarks/results/accuracy.json]

The oracle is the same formula in the machine's widest float (80 bits on x86). Subnormal results count with the spacing
of the subnormals.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import isograd
from isograd.cli import measure
from isograd.cli.files import checked_file
from isograd.numerics import random
from isograd.numerics.bounds import ulp
from isograd.ops.softmax import reference

Array = NDArray[Any]


def numpy_softmax(x: Array) -> Array:
    """What people write in NumPy."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def numpy_log_softmax(x: Array) -> Array:
    """What people write in NumPy."""
    d = x - x.max(axis=-1, keepdims=True)
    return np.asarray(d - np.log(np.exp(d).sum(axis=-1, keepdims=True)))


def inputs() -> dict[str, Array]:
    """Rows of 4,096 float32 logits of different spread."""
    normal = random.normal((64, 4096), seed=1, stream=0).astype(np.float32)
    dominated = normal.copy()
    dominated[:, 0] = 30
    return {
        "spread 1": normal,
        "spread 10": normal * np.float32(10),
        "spread 1, one logit at 30": dominated,
        "spread 1, shifted by 10,000": normal + np.float32(1e4),
    }


def contenders() -> dict[str, dict[str, Callable[[Array], Array]]]:
    """For each operation, who computes it how."""
    found = {
        "softmax": {"isograd": isograd.softmax, "NumPy": numpy_softmax},
        "log_softmax": {"isograd": isograd.log_softmax, "NumPy": numpy_log_softmax},
    }
    try:
        import torch
    except ImportError:
        return found
    found["softmax"]["PyTorch"] = lambda x: torch.softmax(torch.from_numpy(x), -1).numpy()
    found["log_softmax"]["PyTorch"] = lambda x: torch.log_softmax(torch.from_numpy(x), -1).numpy()
    return found


def main() -> None:
    """Print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = checked_file(parser.parse_args().output, "--output")
    oracles = {"softmax": reference.oracle_softmax, "log_softmax": reference.oracle_log_softmax}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for operation, functions in contenders().items():
        for name, x in inputs().items():
            exact = oracles[operation](x)
            spacing = ulp(exact, "float32")
            errors = {
                who: float(np.max(np.abs(function(x).astype(np.longdouble) - exact) / spacing))
                for who, function in functions.items()
            }
            results.setdefault(operation, {})[name] = errors
            row = "  ".join(f"{who} {error:12.4g}" for who, error in errors.items())
            print(f"{operation:12} {name:28} {row}")
    if output:
        torch = sys.modules.get("torch")
        document = {"unit": "ulp, float32, largest error", "machine": measure.machine(torch), "results": results}
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
