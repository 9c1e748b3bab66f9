"""A run as one object: configuration, ledger, means over seeds, front, tables, new costs. Without torch and ray."""
