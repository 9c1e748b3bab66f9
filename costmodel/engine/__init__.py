"""The MPC engine: processes that run it, links between them, and its costs; `costmodel.engine.spu` is how to use it."""
