"""From what a user names to its price: what `costmodel.price` and the commands call."""
