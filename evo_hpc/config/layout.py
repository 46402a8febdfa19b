"""Whether a recipe's parallel layout fits the ranks and the model that it is for. Pure, and without torch: the controller asks, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Compute
from evo_hpc.errors import UserError


class LayoutError(UserError):
    """A parallel layout does not fit the number of ranks, or the model."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups of a job; their product, without `expert`, is the number of ranks."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    """Ranks over which experts are spread; these are ranks of the data, context and tensor dimensions."""
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.context * self.data


def layout_of(compute: Compute, world_size: int) -> Layout:
    """The layout of `world_size` ranks: what tensor, pipeline and context parallelism leave over is data-parallel. Raises LayoutError."""
    model = compute.tensor_parallel * compute.pipeline_parallel * compute.context_parallel
    if world_size % model:
        raise LayoutError(
            f"compute: tensor_parallel x pipeline_parallel x context_parallel = {compute.tensor_parallel} x {compute.pipeline_parallel} x "
            f"{compute.context_parallel} = {model} must divide the trainer's ranks ({world_size}); change these, or the ranks "
            "(cluster.yaml: trainer.ranks, or nodes x tasks_per_node of slurm.train)"
        )
    if (world_size // compute.pipeline_parallel) % compute.expert_parallel:
        raise LayoutError(
            f"compute: expert_parallel ({compute.expert_parallel}) must divide the ranks of one pipeline stage "
            f"({world_size} / {compute.pipeline_parallel} = {world_size // compute.pipeline_parallel})"
        )
    return Layout(
        compute.tensor_parallel, compute.pipeline_parallel, compute.context_parallel, world_size // model, compute.expert_parallel,
        compute.sequence_parallel,
    )


def check_layout(compute: Compute, world_size: int, model_config: Mapping[str, Any] | None) -> Layout:
    """The layout, if it fits a model with this config.json (None: not known yet). Raises LayoutError with every reason, each with the
    names of its fields.

    Context parallelism asks nothing of the heads: its ranks gather keys and values whole.
    """
    layout = layout_of(compute, world_size)
    problems = [] if model_config is None else list(_problems(compute, model_config))
    if problems:
        raise LayoutError("compute: " + "; ".join(problems))
    return layout


def _problems(compute: Compute, config: Mapping[str, Any]) -> Iterator[str]:
    experts = experts_of(config)
    splits: dict[str, dict[str, Any]] = {
        "tensor_parallel": {
            "num_attention_heads": config.get("num_attention_heads"),
            "num_key_value_heads": config.get("num_key_value_heads", config.get("num_attention_heads")),
            "vocab_size": config.get("vocab_size"), "intermediate_size": config.get("intermediate_size"),
        },
        "pipeline_parallel": {"num_hidden_layers": config.get("num_hidden_layers")},
        "expert_parallel": {"num_experts": experts} if experts else {},
    }
    for field, sizes in splits.items():
        by = getattr(compute, field)
        for name, size in sizes.items():
            if isinstance(size, int) and size % by:
                yield f"{field} ({by}) must divide the model's {name} ({size})"
    if compute.expert_parallel > 1 and not experts:
        yield f"expert_parallel is {compute.expert_parallel}, but the model ({config.get('model_type')}) has no experts; leave it at 1"
    if experts and compute.tensor_parallel > 1 and compute.expert_parallel == 1:
        # Each rank would have all experts whole and see its own tokens only, and nothing would add their gradients up.
        yield f"tensor_parallel ({compute.tensor_parallel}) on a model with experts needs expert_parallel > 1, over the same ranks"
    if experts and compute.tensor_parallel > 1 and not compute.sequence_parallel:
        yield f"tensor_parallel ({compute.tensor_parallel}) on a model with experts needs sequence_parallel: true (Megatron trains it only so)"


def experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a layer that has any; 0 for a dense model."""
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    if not isinstance(count, int):
        raise LayoutError(f"config.json: num_experts is {count!r}, not a number")
    return count


def trainer_ranks(cluster: Cluster) -> int:
    """Ranks of a training job as the profile has it started."""
    if cluster.executor == "local":
        return cluster.trainer.ranks
    resources = cluster.slurm.of("train")
    return (resources.nodes or 1) * (resources.tasks_per_node or 1)
