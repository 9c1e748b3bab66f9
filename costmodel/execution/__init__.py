"""What an op graph computes, in the clear or under an engine."""
