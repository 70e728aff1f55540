"""Gradients whose sum, and losses whose classes, do not know how many ranks there are.

    total = igt.distributed.GradientSum(model)
    loss = igt.distributed.vocab_parallel_cross_entropy(logits_of_this_rank, targets)

See `docs/reproducible_training.md`.
"""

from isograd.torch.distributed.gradient_sum import GradientSum
from isograd.torch.distributed.report import GradientReport
from isograd.torch.distributed.vocab_loss import vocab_parallel_cross_entropy
from isograd.torch.distributed.vocab_softmax import vocab_parallel_log_softmax, vocab_parallel_softmax

__all__ = [
    "GradientReport",
    "GradientSum",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_softmax",
    "vocab_parallel_softmax",
]
