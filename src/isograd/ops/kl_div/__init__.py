"""kl_div: the divergence of a distribution from another, given by logarithms."""
