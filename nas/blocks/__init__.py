"""What every block of a parent is worth: each alternative of each half layer, alone in the parent's place."""
