"""What a process needs around kernels: threads, the floating-point environment, memory, compilation."""
