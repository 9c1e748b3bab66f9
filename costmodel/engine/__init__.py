"""The MPC engine: the processes of parties, the links between them, and measurements of costs.

Start with `costmodel.engine.spu`.
"""
