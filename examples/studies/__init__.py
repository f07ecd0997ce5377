"""Studies of minutes to hours, with what they found: GPT-2's choices against LLaMA's, what tutorials claim, longer
contexts."""
