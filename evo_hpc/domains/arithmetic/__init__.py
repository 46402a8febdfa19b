"""The domain `arithmetic`: sums of two numbers, worked out on a scratch-pad. Small enough to learn on a laptop."""
