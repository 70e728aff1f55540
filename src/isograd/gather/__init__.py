"""Gather and scatter: values along an axis by index, and sums over repeated indices."""
