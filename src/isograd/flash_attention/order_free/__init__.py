"""Attention whose bits no machine, order, tile or batch changes: exact integer products in canonical blocks."""
