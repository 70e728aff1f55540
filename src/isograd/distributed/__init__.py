"""Sums over the ranks of a distributed run whose bits do not depend on how many ranks there are."""
