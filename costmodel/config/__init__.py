"""The command line and its files: flags, strict YAML, plain data to dataclasses, units."""
