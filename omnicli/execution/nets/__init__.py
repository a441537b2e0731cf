"""Networks that several families compose: one file each, torch modules and nothing else."""
