"""Prices the models that users name; `costmodel.price` and the commands call this package."""
