"""What a price rests on: the range of its data, and whom the parties have to trust."""
