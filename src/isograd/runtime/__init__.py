"""What compiles and launches kernels: one file a backend, `BACKEND` in each."""
