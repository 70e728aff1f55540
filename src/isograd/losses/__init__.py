"""Losses and what a loss is made of, with their gradients: the same bits on every run and device."""
