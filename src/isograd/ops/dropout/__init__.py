"""Dropout whose mask belongs to the numbers of elements."""
