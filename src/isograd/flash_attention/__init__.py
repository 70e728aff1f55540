"""Flash attention for training: forward, the D pre-pass and the gradients, deterministic."""
