"""Candidates and their recipes, as plain data."""
