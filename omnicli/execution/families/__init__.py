"""Model families: one file each, `load(settings) -> Family`; no family knows another."""
