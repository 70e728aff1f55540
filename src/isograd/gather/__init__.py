"""take_along_axis, scatter sums, embedding, and their gradients."""
