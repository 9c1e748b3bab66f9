"""What the numbers of testbeds come from: measurements and fits."""
