"""What `python -m foundry_kernels` runs besides its overview: checks, compilation ahead of time, tuning."""
