"""sparsemax: the point of the probability simplex nearest to a row."""
