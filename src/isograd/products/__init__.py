"""Order-free products of matrices on GPUs."""
