"""Functions of tensors; no class of ours goes in or out."""
