"""Computes op graphs, in plaintext or under an engine."""
