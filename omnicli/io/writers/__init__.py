"""Output formats: one file each, `write(outcome, folder) -> Path | None`."""
