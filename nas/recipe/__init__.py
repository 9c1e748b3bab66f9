"""Candidates and how they are trained; plain data."""
