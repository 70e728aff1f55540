"""Routing of tokens to experts: top-k, a fused router, permutation and combination, auxiliary losses."""
