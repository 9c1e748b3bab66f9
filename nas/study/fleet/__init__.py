"""The nodes that trials run on: which there are, what is asked of each, which are left out."""
