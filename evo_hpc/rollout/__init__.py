"""Rollouts: token ids in, sampled token ids and their log-probabilities out (vLLM, imported lazily)."""
