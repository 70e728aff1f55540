"""What ranks send each other about rows whose classes are spread over them, and what a row's terms are."""

WORDS = 4  # of a row in a sum: three of the integer, and one for the target's logit or for terms that are not finite
STATISTICS = 6  # of a row: maximum, reciprocal of the sum as a pair, maximum + log(sum) in three parts
LOG_PROBABILITIES, PRODUCTS, VALUES = 0, 1, 2  # the terms of a sum: of logits; x_j * y_j; x_j
