"""Prices and comparisons for people (tables) and programs (JSON)."""
