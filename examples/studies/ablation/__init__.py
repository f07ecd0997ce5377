"""GPT-2's choices against LLaMA's, one at a time: `python -m examples.studies.ablation`."""
