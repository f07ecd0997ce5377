"""Measurements of the numbers that tutorials on transformers claim: `python -m examples.studies.claims`."""
