"""A run as one object: configuration, ledger, means over seeds, front, tables, prices anew. Neither torch nor ray."""
