"""`patch`: what it replaces in a model, its report, its handle."""
