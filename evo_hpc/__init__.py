"""evo_hpc: co-evolves LLM policies and the harness that diagnoses them, on Slurm (EvoTrainer, arXiv 2606.03108)."""

__version__ = "0.1.0"
