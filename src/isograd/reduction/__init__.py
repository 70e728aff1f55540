"""Sums and means, the same bits in every order of the terms."""
