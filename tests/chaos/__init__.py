"""A whole campaign against anything that Slurm may do to it."""
