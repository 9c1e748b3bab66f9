"""The MPC engine: processes of parties, links between them, and measurements of costs; start with `spu`."""
