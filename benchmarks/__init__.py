"""Speed and memory of every operation beside its peers: `pytest benchmarks --benchmark-only`."""
