"""Kernels compiled ahead of time for GPUs that need not be here, and what their machine code says."""
