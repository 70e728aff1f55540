"""What every operation is made of: its declaration, its kernels, and how it is called."""
