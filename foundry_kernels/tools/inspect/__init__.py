"""Compiles kernels ahead of time for GPUs that need not be present, and analyses their machine code."""
