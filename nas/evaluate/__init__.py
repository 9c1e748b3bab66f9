"""Judges a model by its parent: unseen text, tasks, and what both write."""
