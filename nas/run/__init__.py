"""A run as one object: configuration, ledger, means over seeds, front, tables. Imports neither torch nor Ray."""
