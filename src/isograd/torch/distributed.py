"""Gradients whose sum does not know how many ranks there were.

    total = igt.distributed.GradientSum(model)

See `docs/reproducible_training.md`.
"""

from isograd.distributed.gradient_sum import GradientSum
from isograd.distributed.report import GradientReport

__all__ = ["GradientReport", "GradientSum"]
