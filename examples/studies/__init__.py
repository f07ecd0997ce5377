"""Studies that take minutes to hours, with their results: GPT-2's choices against LLaMA's, claims of tutorials, longer
contexts."""
