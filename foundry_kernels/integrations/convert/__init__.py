"""`from_hf`: configurations and weights of transformers, read into models of this package."""
