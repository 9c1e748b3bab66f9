"""What ops compute, in plaintext and in emulated fixed point, and the memory that this takes under an engine."""
