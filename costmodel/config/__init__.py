"""The command line and its files: flags, strict YAML, decoding to dataclasses, and units."""
