"""exp, log and silu, the same bits on every machine."""
