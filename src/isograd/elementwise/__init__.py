"""exp, log, sigmoid and silu, the same bits on every machine."""
