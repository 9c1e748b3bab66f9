"""The MPC engine: processes that run it, the links between them, and what it sends and takes.

`costmodel.engine.spu` is how to use it.
"""
