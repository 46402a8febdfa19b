"""The one door to megatron-core: the CPU shim first, then every name that this package uses."""

from __future__ import annotations

import logging
import warnings

from evo_hpc.training import mcore_cpu

CPU_SHIM = mcore_cpu.install()

with warnings.catch_warnings():
    # Without a GPU, megatron announces on import, six times, that Apex and Transformer Engine are absent.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", category=UserWarning)
    import megatron.core
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

__version__: str = megatron.core.__version__

__all__ = [
    "CPU_SHIM",
    "AsyncRequest",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "ShardedObject",
    "TorchDistSaveShardedStrategy",
    "TransformerConfig",
    "dist_checkpointing",
    "filesystem_async",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "get_megatron_optimizer",
    "parallel_state",
    "tensor_parallel",
]

logging.getLogger("megatron.core").setLevel(logging.WARNING)
