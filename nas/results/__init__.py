"""What a run has found: its ledger, its front, its prices anew. Neither torch nor ray."""
