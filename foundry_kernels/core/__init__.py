"""What operations and backends are built on: it knows of none of them."""
