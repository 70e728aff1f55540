"""What kernels on a kind of device have in common, and how they are launched."""
