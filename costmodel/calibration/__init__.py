"""Measures ops under an engine, and fits testbeds to the measurements."""
