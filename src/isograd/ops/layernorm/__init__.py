"""layernorm: rows less their mean, divided by the root of the mean of their squares."""
