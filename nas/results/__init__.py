"""What a run has found: its ledger, its front, its floor, its prices anew. Neither torch nor ray."""
