"""The policy: a Megatron model that is scored, and if trainable also updated, exported and checkpointed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from evo_hpc.config.recipe import Compute
from evo_hpc.training import hf_weights, mcore, parallel, weight_files
from evo_hpc.training.architectures import ModelShape, read_shape
from evo_hpc.training.batch import MicroBatch, Split, collate
from evo_hpc.training.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    finalize_model_grads,
    get_forward_backward_func,
    parallel_state,
)
from evo_hpc.training.model import build_model, uses_transformer_engine
from evo_hpc.training.packing import Sample, check, pack, shard
from evo_hpc.training.scoring import token_logprobs
from evo_hpc.training.weight_names import hf_shapes

__all__ = ["Policy", "Sample"]


class Policy:
    """A model with its shape and its packing budget. Several may live in one process; they share one parallel layout.

    `module` is the bare GPTModel, or this rank's pipeline stage of it; `trained` is Megatron's DDP around it, or None for
    a policy that is only scored. In bfloat16 the module itself is: Megatron's Float16Module would add casts of inputs and
    logits, of which the first are integers and the second are made where they are used.
    """

    def __init__(
        self, module: GPTModel, shape: ModelShape, *, trainable: bool, token_budget: int, compute: Compute = Compute(),  # noqa: B008
    ) -> None:
        self.module = module
        self.shape = shape
        self.token_budget = token_budget
        self.compute = compute
        self.shares_out_optimizer = parallel.shares_out_optimizer(compute)
        self.split = Split(
            parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size() if compute.sequence_parallel else 1,
        )
        self.trained: DistributedDataParallel | None = None
        module.requires_grad_(trainable)
        module.train(trainable)
        if trainable:
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=self.shares_out_optimizer,
                average_in_collective=False,
            )
            self.trained = DistributedDataParallel(module.config, settings, module)
            module.config.finalize_model_grads_func = finalize_model_grads
            module.config.no_sync_func = self.trained.no_sync

    @classmethod
    def from_hf(cls, folder: Path, *, trainable: bool, token_budget: int, compute: Compute = Compute()) -> Policy:  # noqa: B008
        """Load a Hugging Face model folder; calls `parallel.initialize(compute)` if nobody has.

        Raises UnsupportedModelError on an architecture that is not supported, WeightsError on broken or unfitting weights.
        """
        shape = read_shape(folder)
        tensors = weight_files.read_folder(folder, shape)
        if not parallel_state.model_parallel_is_initialized():
            parallel.initialize(compute)
        module = build_model(shape, compute)
        hf_weights.load_state(module, tensors, shape)
        return cls(module, shape, trainable=trainable, token_budget=token_budget, compute=compute)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return next(self.module.parameters()).dtype

    def forward(self, batch: MicroBatch, model: Any = None) -> Tensor:
        """Logits [1, rows, vocab / tp] of a packed micro-batch, from `model` or the bare module.

        Before the last pipeline stage: hidden states [rows / tp or rows, 1, hidden]; after the first they come in by `set_input_tensor`.
        """
        return (self.module if model is None else model)(batch.tokens, batch.positions, None, packed_seq_params=batch.layout)

    def micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], MicroBatch]]:
        """This data-parallel rank's share of `samples`, packed: (indices into samples, tensors).

        A one-token sample predicts nothing and is left out. Where experts are spread over ranks, these must call them
        equally often: those with fewer micro-batches get idle ones, without an index. Raises SampleError on a malformed sample.
        """
        check(samples, self.shape.vocab_size)
        scored = [i for i, sample in enumerate(samples) if len(sample) > 1]
        rows = [len(samples[i]) - 1 for i in scored]
        rank, world_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

        def share(rank: int) -> list[list[int]]:
            mine = [scored[i] for i in shard(rows, rank, world_size)]
            return [[mine[i] for i in packed] for packed in pack([len(samples[i]) - 1 for i in mine], self.token_budget)]

        mine, count = share(rank), 0
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            count = max(len(share(other)) for other in range(world_size))
        for indices in mine:
            yield indices, collate([samples[i] for i in indices], parallel.device(), self.split)
        for _ in range(len(mine), count):
            yield [], self.idle_batch(samples[0])

    def idle_batch(self, like: Sample) -> MicroBatch:
        """What a rank without samples runs, to join the others' collectives: one row, no loss, the fields that `like` has."""
        def zeros(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else np.zeros(2, np.float32)

        sample = Sample(
            [0, 0], [0, 0], 0.0, zeros(like.old_logprobs), zeros(like.ref_logprobs), zeros(like.sampled_logprobs), zeros(like.weights)
        )
        return collate([sample], parallel.device(), self.split)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], *, temperature: float) -> list[np.ndarray]:
        """log p(token_t | tokens before t) at `temperature`: a float32 array [tokens] for each sample, 0.0 at t = 0.

        Every rank passes the same samples and gets the full answer; the work is split over all of them.
        """
        starts = np.cumsum([0, *(len(sample) for sample in samples)])
        found = torch.zeros(int(starts[-1]), device=parallel.device())
        batches = list(self.micro_batches(samples))
        rest = iter(batches)

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., None]]:
            indices, batch = next(rest)

            def keep(logits: Tensor, non_loss_data: bool) -> None:
                if not indices:
                    return
                values = token_logprobs(logits, batch.targets, temperature)[0].index_select(0, batch.scored)
                places = np.concatenate([starts[i] + np.arange(1, len(samples[i])) for i in indices])[batch.scored_at]
                found[torch.from_numpy(places).to(found.device)] = values

            return self.forward(batch, model), keep

        if batches:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[self.module],
                num_microbatches=len(batches),
                seq_length=1,  # the stages tell one another the sizes
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:  # each token was scored by one of them
            dist.all_reduce(found, group=group)
        return [piece.numpy() for piece in parallel.from_last_stage(found).cpu().split([len(sample) for sample in samples])]

    def export_state(self) -> dict[str, Tensor]:
        """The weights under their Hugging Face names, full, on CPU, copied, on rank 0; elsewhere nothing. Every rank must call."""
        return hf_weights.export_state(self.module, self.shape)

    def save_hf(self, folder: Path, tokenizer_from: Path) -> None:
        """Write a Hugging Face folder, in the precision that the policy computes in, from rank 0; every rank must call and returns
        when the files are there."""
        tensors = hf_weights.export_stream(self.module, self.shape)
        if parallel.is_main():
            weight_files.save_folder(folder, tensors, self.shape, tokenizer_from, dtype=self.dtype)
        for _ in tensors:  # on the others nothing comes, but they must take part
            pass
        parallel.barrier()

    def effective_config(self) -> dict[str, str | int | float | bool]:
        """What Megatron and torch really use, read back from the built objects, as plain scalars."""
        config = self.module.config
        return {
            "model_type": self.shape.model_type,
            "parameters": sum(math.prod(size) for size in hf_shapes(self.shape).values()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(next(self.module.parameters()).device),
            "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "attention": type(self.module.decoder.layers[0].self_attention.core_attention).__name__,
            "transformer_engine": uses_transformer_engine(),
            "cpu_shim": mcore.CPU_SHIM,
            "tensor_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "data_parallel_size": parallel_state.get_data_parallel_world_size(),
            "expert_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "sequence_parallel": config.sequence_parallel,
            "layers_here": len(self.module.decoder.layers),
            "layer_spec": "transformer_engine" if uses_transformer_engine() else "local",
            "norm": type(self.module.decoder.layers[0].input_layernorm).__name__,
            "recompute": config.recompute_granularity or "none",
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
