"""Formats costs and comparisons as tables and JSON."""
