"""How a model is run: rewrites of op graphs that change a price and not the logits that are asked for."""
