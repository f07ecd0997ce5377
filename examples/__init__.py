"""Programs to run and to copy."""
