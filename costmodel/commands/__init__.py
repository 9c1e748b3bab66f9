"""The commands of `python -m costmodel`, and their output."""
