"""What a candidate is and how it is trained; plain data."""
