"""Which candidates to train next: strategies behind one ask and tell."""
