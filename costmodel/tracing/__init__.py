"""Trace a torch model to its op graph by matching patterns in its exported program; see `costmodel.tracing.trace`."""
