"""Run op graphs under SecretFlow-SPU, CrypTen or a CKKS library, and measure their costs; start with `spu`."""
