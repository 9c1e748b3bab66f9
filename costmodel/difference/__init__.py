"""How two prices differ: op by op, and on which network they are equal."""
