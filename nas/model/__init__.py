"""The decoder in torch, and its weights, named after the nodes of the cost model's op graph."""
