"""The op graph of a torch model from its exported program, pattern by pattern.

`costmodel.tracing.trace` is how to use it.
"""
