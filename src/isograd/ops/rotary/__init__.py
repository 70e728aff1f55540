"""Rotary position embeddings, applied."""
