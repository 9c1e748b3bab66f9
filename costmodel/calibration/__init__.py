"""Measure the numbers in testbeds, and fit them."""
