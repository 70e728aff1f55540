"""Optimizer steps and gradient norms: definitions, and kernels that go through many tensors at once."""
