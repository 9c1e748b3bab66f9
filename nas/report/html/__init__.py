"""A run as one self-contained HTML page: first the answer, then the evidence."""
