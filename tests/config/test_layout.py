"""Which layouts fit which ranks and models, and what is said where they do not."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.layout import Layout, LayoutError, check_layout, layout_of, trainer_ranks
from evo_hpc.config.recipe import Compute, Recipe
from evo_hpc.lineage.factors import changes
from evo_hpc.lineage.identity import learning_fields

DENSE = {
    "model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "intermediate_size": 3072,
    "num_hidden_layers": 28,
}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 128}


@pytest.mark.parametrize(("settings", "ranks", "expected"), [
    ({}, 1, Layout()),
    ({}, 6, Layout(data=6)),
    ({"tensor_parallel": 4, "pipeline_parallel": 2, "context_parallel": 2}, 32, Layout(tensor=4, pipeline=2, context=2, data=2)),
    ({"tensor_parallel": 2, "sequence_parallel": True}, 8, Layout(tensor=2, data=4, sequence=True)),
    ({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 8}, 8, Layout(tensor=2, data=4, expert=8, sequence=True)),
])
def test_what_is_left_over_is_data_parallel(settings, ranks, expected):
    assert layout_of(Compute(**settings), ranks) == expected
    model = SPARSE if "expert_parallel" in settings else DENSE
    assert check_layout(Compute(**settings), ranks, model) == check_layout(Compute(**settings), ranks, None) == expected


@pytest.mark.parametrize(("settings", "ranks", "model", "message"), [
    ({"tensor_parallel": 2}, 3, DENSE,
     r"tensor_parallel x pipeline_parallel x context_parallel = 2 x 1 x 1 = 2 must divide the trainer's ranks \(3\); .*trainer.ranks"),
    ({"context_parallel": 2, "pipeline_parallel": 2}, 2, DENSE, r"= 1 x 2 x 2 = 4 must divide the trainer's ranks \(2\)"),
    ({"tensor_parallel": 16}, 16, DENSE, r"tensor_parallel \(16\) must divide the model's num_key_value_heads \(8\)"),
    ({"tensor_parallel": 3}, 3, DENSE, "num_attention_heads.*; .*num_key_value_heads.*; .*vocab_size"),
    ({"tensor_parallel": 2}, 2, {**DENSE, "intermediate_size": 3071}, r"intermediate_size \(3071\)"),
    ({"tensor_parallel": 2}, 2, {**DENSE, "vocab_size": 7}, r"vocab_size \(7\)"),
    ({"tensor_parallel": 4}, 4, {"num_attention_heads": 6}, r"num_attention_heads \(6\).*num_key_value_heads \(6\)"),
    ({"pipeline_parallel": 8}, 8, DENSE, r"pipeline_parallel \(8\) must divide the model's num_hidden_layers \(28\)"),
    ({"expert_parallel": 2}, 2, DENSE, r"expert_parallel is 2, but the model \(qwen3\) has no experts"),
    ({"tensor_parallel": 2, "sequence_parallel": True}, 2, SPARSE, r"tensor_parallel \(2\) on a model with experts needs expert_parallel > 1"),
    ({"expert_parallel": 3}, 3, SPARSE, r"expert_parallel \(3\) must divide the model's num_experts \(128\)"),
    ({"expert_parallel": 4}, 6, SPARSE, r"expert_parallel \(4\) must divide the ranks of one pipeline stage \(6 / 1 = 6\)"),
    ({"tensor_parallel": 2}, 2, SPARSE, "needs sequence_parallel: true"),
])
def test_a_layout_that_does_not_fit_is_refused_with_its_fields(settings, ranks, model, message):
    with pytest.raises(LayoutError, match=message):
        check_layout(Compute(**settings), ranks, model)


@pytest.mark.parametrize(("settings", "message"), [
    ({"sequence_parallel": True}, "it needs tensor_parallel > 1"),
    ({"expert_parallel": 2, "tensor_parallel": 2}, "needs sequence_parallel: true"),
    ({"tensor_parallel": 0}, "greater than 0"),
    ({"precision": "float16"}, "'auto', 'float32' or 'bfloat16'"),
    ({"recompute": "some"}, "'none', 'selective' or 'full'"),
    ({"tensors": 2}, "Extra inputs"),
])
def test_what_needs_no_model_is_refused_in_the_recipe(settings, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        Recipe.model_validate({"compute": settings})


def test_how_a_run_computes_is_no_factor_and_no_part_of_what_it_is():
    plain, other = Recipe(), Recipe(compute=Compute(tensor_parallel=2, recompute="full"))
    assert {change.factor for change in changes(plain, other)} == {"system"}
    assert learning_fields(plain) == learning_fields(other)


def test_ranks_come_from_the_executor_that_starts_them():
    local = Cluster.model_validate({"trainer": {"ranks": 3}, "slurm": {"train": {"nodes": 2, "tasks_per_node": 4}}})
    assert trainer_ranks(Cluster()) == 1 and trainer_ranks(local) == 3
    slurm = local.model_copy(update={"executor": "slurm"})
    assert trainer_ranks(slurm) == 8
    assert trainer_ranks(Cluster(executor="slurm")) == 1
