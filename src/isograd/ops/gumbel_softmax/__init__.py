"""Gumbel-softmax: a relaxed sample of a categorical distribution."""
