"""Run op graphs under SecretFlow-SPU, CrypTen or a CKKS library, and measure their costs. Read module `spu` first."""
