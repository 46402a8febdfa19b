"""The one door to megatron-core: the CPU shim first, then every name that this package uses."""

from __future__ import annotations

import logging
import warnings

from evo_hpc.training import mcore_cpu, mcore_fixes

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
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

# 0.16 defines them beside Transformer Engine alone, and then asks whether they are None
for _name in ("te_general_gemm", "fused_permute", "fused_permute_with_probs", "fused_unpermute", "fused_sort_chunks_by_index",
              "fused_sort_chunks_by_index_with_probs", "fused_topk_with_score_function", "fused_moe_aux_loss",
              "fused_compute_score_for_moe_aux_loss"):  # fmt: skip
    vars(moe_utils).setdefault(_name, None)

__version__: str = megatron.core.__version__

__all__ = [
    "CPU_SHIM",
    "AsyncRequest",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "IdentityOp",
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

# What megatron does at every update, or says of a recomputed attention whichever it is: no reader of a log could act on it.
for _message in (
    r"The \.grad attribute of a Tensor that is not a leaf", r"`torch\.distributed\.\w+_tensor` is deprecated",
    "If you are using transformer_engine as the transformer implementation, the core_attn",
):
    warnings.filterwarnings("ignore", message=_message)
mcore_fixes.fix_distributed_load(DistributedOptimizer)
logging.getLogger("megatron.core").setLevel(logging.WARNING)
