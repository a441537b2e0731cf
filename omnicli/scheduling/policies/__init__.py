"""How a token is chosen: one file each, `build(**options) -> Policy`."""
