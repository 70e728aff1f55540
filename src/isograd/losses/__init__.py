"""Losses over logits and their gradients, the same bits in every order of the classes and of the rows."""
