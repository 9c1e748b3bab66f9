"""How an exported torch program becomes ops, pattern by pattern; `costmodel.trace` is how to use it."""
