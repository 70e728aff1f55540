"""The arithmetic contract: its definition in NumPy, and the same for each kind of kernel."""
