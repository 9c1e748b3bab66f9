"""Training text: from documents to token files, and the floor that n-grams of it set."""
