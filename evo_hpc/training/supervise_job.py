"""The supervised job that makes a base policy where a campaign brings none: cross entropy on worked examples, on Megatron."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

from evo_hpc.config.campaign import Supervised
from evo_hpc.config.recipe import Optimizer as OptimizerSettings
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import get_domain
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.rollout.exchange import policy_meta
from evo_hpc.store.atomic import write_bytes
from evo_hpc.store.manifest import complete
from evo_hpc.training import parallel
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from evo_hpc.training.random_init import write_random_weights
from evo_hpc.training.rollouts import probe_of
from evo_hpc.training.steps import supervised_step


def examples(context: RoleContext, settings: Supervised, tokenizer: ChatTokenizer) -> Iterator[Sample]:
    """Worked examples of the campaign's domain as samples: loss on the response and its end token only."""
    domain = get_domain(context.campaign.domain.name)
    config = domain.config_type.model_validate(context.campaign.domain.config)
    end = tokenizer.eos_ids[0]
    for messages, target in domain.supervised_examples(config, seed=settings.seed):
        prompt, response = tokenizer.encode_prompt(messages), [*tokenizer.encode_text(target), end]
        yield Sample(token_ids=[*prompt, *response], loss_mask=[0] * len(prompt) + [1] * len(response))


def run(context: RoleContext) -> dict[str, Any]:
    """Train from random weights and export. Short by design: a restart begins anew, with the same result."""
    settings = context.campaign.base_model.supervised
    domain = get_domain(context.campaign.domain.name)
    if settings is None or not hasattr(domain, "supervised_examples"):
        raise UserError(f"base_model: the domain {domain.name} cannot make a base policy by itself; set base_model.path to a model folder")
    context.progress(stage="supervised", step=0, steps=settings.steps)
    parallel.set_num_threads(context.cluster.trainer.threads)
    parallel.initialize(seed=settings.seed)
    start, final = context.incarnation.policy(0), context.incarnation.policy(settings.steps)
    if parallel.is_main():
        for folder in (start, final):
            shutil.rmtree(folder, ignore_errors=True)
        domain.write_policy_files(start)
        write_random_weights(start, settings.seed)
    parallel.barrier()
    policy = Policy.from_hf(start, trainable=True, token_budget=settings.token_budget)
    optimizer = Optimizer(policy, OptimizerSettings(
        lr=settings.lr, lr_warmup_updates=settings.lr_warmup_updates, weight_decay=settings.weight_decay,
    ))
    if parallel.is_main():
        write_bytes(context.incarnation.effective(context.role), dump_tree({**policy.effective_config(), "optimizer": optimizer.effective_config()}))
    stream = examples(context, settings, ChatTokenizer.from_folder(start))
    began, tokens, loss = time.perf_counter(), 0.0, float("nan")
    batch: list[Sample] = []
    for step in range(1, settings.steps + 1):
        if any(parallel.gather_objects(context.stop_requested)):
            raise Stopped(f"{context.role}: stopped on request")
        batch = [next(stream) for _ in range(settings.batch_size)]
        metrics = supervised_step(policy, optimizer, batch)
        tokens, loss = tokens + metrics["tokens"], metrics["loss"]
        elapsed = time.perf_counter() - began
        context.progress(
            step=step, loss=round(loss, 4), tokens_per_second=round(tokens / elapsed),
            seconds_left=round(elapsed / step * (settings.steps - step), 1),
        )
    context.check_claim()
    policy.save_hf(final, tokenizer_from=start)
    probe = probe_of(policy, batch[0].token_ids)
    if parallel.is_main():
        complete(final, policy_meta(settings.steps, probe))
    return {
        "policy": context.relative(final), "step": settings.steps, "loss": loss, "tokens": tokens,
        "effective": {"trainer": context.relative(context.incarnation.effective(context.role))},
    }
