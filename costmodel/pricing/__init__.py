"""Prices what a user names: what `costmodel.price` and the commands call."""
