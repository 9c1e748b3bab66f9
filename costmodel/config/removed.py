"""Flags that former versions had, by the name of the setting, and what to use in their place."""

REMOVED: dict[str, str] = {}
