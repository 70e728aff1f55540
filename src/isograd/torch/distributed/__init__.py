"""Gradients whose sum, losses whose classes, layers whose weight and attention whose sequence know of no ranks.

    total = igt.distributed.GradientSum(model)
    loss = igt.distributed.vocab_parallel_cross_entropy(logits_of_this_rank, targets)
    y = igt.distributed.row_parallel_linear(igt.distributed.column_parallel_linear(x, up), down)
    o = igt.distributed.context_parallel_attention(q_of_this_rank, k_of_this_rank, v_of_this_rank, causal=True)

See `docs/reproducible_training.md`.
"""

from isograd.torch.distributed.context_attention import context_parallel_attention
from isograd.torch.distributed.gradient_sum import GradientSum
from isograd.torch.distributed.parallel_linear import column_parallel_linear, row_parallel_linear
from isograd.torch.distributed.report import GradientReport
from isograd.torch.distributed.vocab_loss import vocab_parallel_cross_entropy
from isograd.torch.distributed.vocab_softmax import vocab_parallel_log_softmax, vocab_parallel_softmax

__all__ = [
    "GradientReport",
    "GradientSum",
    "column_parallel_linear",
    "context_parallel_attention",
    "row_parallel_linear",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_softmax",
    "vocab_parallel_softmax",
]
