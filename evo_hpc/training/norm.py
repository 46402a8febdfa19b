"""RMSNorm for Megatron's local layers, where Transformer Engine's is not there."""

from __future__ import annotations

from typing import Any

import torch

from evo_hpc.training.mcore import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's, but fit for sequence parallelism, which Megatron's wrapper of it refuses.

    There each tensor-parallel rank sees its own tokens only: the mark has Megatron sum the weight's gradient over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
