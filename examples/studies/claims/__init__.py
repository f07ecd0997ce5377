"""What tutorials on transformers claim in numbers, measured: `python -m examples.studies.claims`."""
