"""Write the digests that ship with the package anew.

    python tools/update_digests.py [OPERATION...]

The digests of `isograd verify` are those of the NumPy reference, which defines the results, not of any kernel. The
script then lets every kernel of this machine check against them, and trains the demo's models. With names of operations
it computes those and the optimizers' alone; the others and the demos keep what is published. Run it after a change of
the contract or of the cases, and look at what changed: a digest that moves without a change of the contract is a bug.
"""

import json
import sys
from pathlib import Path
from typing import Any

from isograd.cli import check, demo_lm, training
from isograd.cli.suites import SUITES, cases
from isograd.core import registry
from isograd.core.cases import Case, Suite
from isograd.optimizers import cases as optimizers
from isograd.runtime.fenv import default_environment

TARGET = Path(__file__).parent.parent / "src" / "isograd" / "cli" / "digests.json"


def _digests(suite: Suite, cases: list[Case]) -> dict[str, str]:
    """By case, where a kernel promises bits; elsewhere only the inputs have a digest."""
    results = {c.name: check.reference_results(suite, c) for c in cases}
    return {name: check.results_digest(x) for name, x in results.items() if x is not None}


def main(named: list[str]) -> int:
    """Compute, check and write; the exit status is 1 if a kernel disagrees with the reference."""
    digests: dict[str, Any] = {"inputs": {}, "results": {}}
    before = check.published()
    if unknown := set(named) - set(SUITES):
        raise SystemExit(f"no such operation: {', '.join(sorted(unknown))}")
    for operation, suite in SUITES.items():
        if named and operation not in named:
            for kind in ("inputs", "results"):
                digests[kind][operation] = before[kind][operation]
            continue
        for dtype in suite.dtypes:
            given = cases(operation, dtype)
            with default_environment():
                results = _digests(suite, given)
            if len({c.name for c in given}) != len(given):
                raise SystemExit(f"{operation} {dtype}: two cases share a name")
            digests["inputs"].setdefault(operation, {})[dtype] = check.inputs_digest(given)
            digests["results"].setdefault(operation, {})[dtype] = results
    with default_environment():
        digests["optimizers"] = {c.name: check.results_digest(c.expected()) for c in optimizers.cases()}
    if named:
        digests |= {key: before[key] for key in ("demo", "language_model")}
    else:
        run = training.train(training.load_data(), training.EPOCHS, training.SEED)
        digests["demo"] = {"epochs": training.EPOCHS, "seed": training.SEED, "weights": training.digest(run)}
        lengths = [int(steps) for steps in before["language_model"]["weights"]["float32"]]
        digests["language_model"] = demo_lm.published_entry(lengths)
    status, differs = 0, False
    for entry in registry.kernels():
        if entry.operation in (named or SUITES) and entry.device in check.DEVICES:
            report = check.verify_kernel(entry, cases(entry.operation, entry.dtype), digests)
            for failure in report.failures:
                print(f"{entry.operation} {entry.dtype} {entry.kernel.name}: {failure}")
                status, differs = 1, differs or failure.check == "digest"
    if differs:
        print("Nothing written: a kernel differs from the reference.")
    else:
        TARGET.write_text(json.dumps(digests, indent=1) + "\n", "utf-8")
        print(f"{TARGET.name} written")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
