"""softmax, log_softmax and their gradients."""
