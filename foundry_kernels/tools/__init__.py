"""The commands of `python -m foundry_kernels`: checks, compilation ahead of time, tuning."""
