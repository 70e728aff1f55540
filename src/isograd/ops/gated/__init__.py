"""silu and gelu of a gate, times another array: what gated feed-forward layers are made of."""
