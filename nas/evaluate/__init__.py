"""Compares a model with its parent: on unseen text, on tasks, and in what both write."""
