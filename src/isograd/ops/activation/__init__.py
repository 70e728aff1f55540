"""silu and gelu, and their gradients."""
