"""How stages follow each other: one file each, `run(wave, ...)`."""
