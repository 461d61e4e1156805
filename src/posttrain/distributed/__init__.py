"""Beyond one process: proxies that satisfy the protocols, over Ray and over torchrun."""
