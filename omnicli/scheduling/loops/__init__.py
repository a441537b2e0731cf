"""How autoregressive rows advance: one file each, `run(...)`."""
