"""Converts trained weights: folds them, transfers them to other architectures, and exchanges them with transformers."""
