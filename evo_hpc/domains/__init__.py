"""Domains: tasks, verifiers and tokenizers. Start at `evo_hpc.domains.base`."""
