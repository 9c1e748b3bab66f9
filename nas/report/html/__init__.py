"""A run as one HTML page that needs nothing else: the answer first, then what it rests on."""
