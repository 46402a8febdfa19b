"""The policy and its updates: Megatron-core model, GRPO, checkpoints, Hugging Face conversion. Needs torch and megatron-core."""
