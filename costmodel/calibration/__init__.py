"""Measurements and fits of the numbers in testbeds."""
