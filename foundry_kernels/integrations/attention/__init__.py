"""Attention of Hugging Face transformers by name: its functions, its masks, and the packed documents of a call."""
