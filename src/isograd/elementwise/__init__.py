"""exp, log, sigmoid, silu, tanh, gelu and powers, the same bits on every machine."""
