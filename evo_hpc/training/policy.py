"""The policy: a Megatron model that is scored, and if trainable also updated, exported and checkpointed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evo_hpc.training import hf_weights, mcore, parallel
from evo_hpc.training.batch import MicroBatch, collate
from evo_hpc.training.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    finalize_model_grads,
    parallel_state,
)
from evo_hpc.training.model import Qwen3Shape, build_model, read_shape, uses_transformer_engine
from evo_hpc.training.packing import Sample, check, pack, shard
from evo_hpc.training.scoring import token_logprobs

__all__ = ["Policy", "Sample"]


class Policy:
    """A model with its shape and its packing budget. Several may live in one process; they share one parallel layout.

    `module` is the bare GPTModel; `trained` is Megatron's DDP around it, or None for a policy that is only scored.
    """

    def __init__(self, module: GPTModel, shape: Qwen3Shape, *, trainable: bool, token_budget: int) -> None:
        self.module = module
        self.shape = shape
        self.token_budget = token_budget
        self.trained: DistributedDataParallel | None = None
        module.requires_grad_(trainable)
        module.train(trainable)
        if trainable:
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=False,
                average_in_collective=False,
            )
            self.trained = DistributedDataParallel(module.config, settings, module)
            module.config.finalize_model_grads_func = finalize_model_grads
            module.config.no_sync_func = self.trained.no_sync

    @classmethod
    def from_hf(cls, folder: Path, *, trainable: bool, token_budget: int) -> Policy:
        """Load a Hugging Face Qwen3 folder; calls `parallel.initialize()` if nobody has.

        Raises UnsupportedModelError on another architecture, WeightsError on broken or unfitting weights.
        """
        shape = read_shape(folder)
        tensors = hf_weights.read_folder(folder, shape)
        if not parallel_state.model_parallel_is_initialized():
            parallel.initialize()
        module = build_model(shape)
        hf_weights.load_state(module, tensors, shape)
        return cls(module, shape, trainable=trainable, token_budget=token_budget)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logits [1, rows, vocab / tp] of a packed micro-batch, from the bare module."""
        return self.module(batch.tokens, batch.positions, None, packed_seq_params=batch.layout)

    def micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], MicroBatch]]:
        """This data-parallel rank's share of `samples`, packed: (indices into samples, tensors).

        A one-token sample predicts nothing and is left out. Raises SampleError on a malformed sample.
        """
        check(samples, self.shape.vocab_size)
        scored = [i for i, sample in enumerate(samples) if len(sample) > 1]
        rows = [len(samples[i]) - 1 for i in scored]
        rank, world_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = [scored[i] for i in shard(rows, rank, world_size)]
        for packed in pack([len(samples[i]) - 1 for i in mine], self.token_budget):
            indices = [mine[i] for i in packed]
            yield indices, collate([samples[i] for i in indices], parallel.device())

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], *, temperature: float) -> list[np.ndarray]:
        """log p(token_t | tokens before t) at `temperature`: a float32 array [tokens] for each sample, 0.0 at t = 0.

        Every rank passes the same samples and gets the full answer; the work is split over data-parallel ranks.
        """
        result = [np.zeros(len(sample), np.float32) for sample in samples]
        scored: dict[int, np.ndarray] = {}
        for indices, batch in self.micro_batches(samples):
            values = token_logprobs(self.forward(batch), batch.targets, temperature)[0].cpu()
            scored.update({i: piece.numpy() for i, piece in zip(indices, values.split(batch.rows), strict=True)})
        for part in parallel.gather_objects(scored):
            for i, values in part.items():
                result[i][1:] = values
        return result

    def export_state(self) -> dict[str, Tensor]:
        """The weights under their Hugging Face names, full, float32, on CPU, copied. Every rank must call."""
        return hf_weights.export_state(self.module, self.shape)

    def save_hf(self, folder: Path, tokenizer_from: Path) -> None:
        """Write a Hugging Face folder from rank 0; every rank must call and returns when the files are there."""
        tensors = self.export_state()
        if parallel.is_main():
            hf_weights.save_folder(folder, tensors, self.shape, tokenizer_from)
        parallel.barrier()

    def effective_config(self) -> dict[str, str | int | float | bool]:
        """What Megatron and torch really use, read back from the built objects, as plain scalars."""
        config = self.module.config
        return {
            "model_type": "qwen3",
            "parameters": sum(math.prod(size) for size in hf_weights.hf_shapes(self.shape).values()),
            "dtype": str(config.params_dtype).removeprefix("torch."),
            "device": str(next(self.module.parameters()).device),
            "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "attention": type(self.module.decoder.layers[0].self_attention.core_attention).__name__,
            "transformer_engine": uses_transformer_engine(),
            "cpu_shim": mcore.CPU_SHIM,
            "tensor_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "data_parallel_size": parallel_state.get_data_parallel_world_size(),
            "sequence_parallel": config.sequence_parallel,
            "backend": torch.distributed.get_backend(),
            "apply_rope_fusion": config.apply_rope_fusion,
            "bias_activation_fusion": config.bias_activation_fusion,
            "masked_softmax_fusion": config.masked_softmax_fusion,
            "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
            "cross_entropy_loss_fusion": config.cross_entropy_loss_fusion,
            "calculate_per_token_loss": config.calculate_per_token_loss,
            "token_budget": self.token_budget,
            "trainable": self.trained is not None,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "torch": torch.__version__,
            "megatron_core": mcore.__version__,
        }
