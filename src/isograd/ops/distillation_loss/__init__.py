"""distillation_loss: the divergence of a teacher from a student."""
