"""Runs of op graphs by real engines, SecretFlow-SPU, CrypTen and a CKKS library, with measured costs; see `spu`."""
