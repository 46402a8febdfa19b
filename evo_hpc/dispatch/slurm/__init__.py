"""Slurm: what it is asked, what it answers, and what that means for a job."""
