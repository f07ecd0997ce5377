"""The registry of operations, and what each of them builds on; it knows no operation."""
