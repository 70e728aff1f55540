"""Skeletons of kernels on the rows of an axis, which families are written with."""
