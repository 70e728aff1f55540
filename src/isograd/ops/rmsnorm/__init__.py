"""rmsnorm: rows divided by the root of the mean of their squares."""
