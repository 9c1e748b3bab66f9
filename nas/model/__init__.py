"""The decoder in torch and its weights by node of the op graph."""
