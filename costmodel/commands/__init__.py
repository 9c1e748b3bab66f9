"""The commands of `python -m costmodel`: what each prints; the one package that knows architectures."""
