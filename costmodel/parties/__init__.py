"""Processes that run the MPC engine, and the links between them; `costmodel.engine` is how to use them."""
