"""What compiles and launches the kernels of operations: one file a backend, `BACKEND` in each."""
