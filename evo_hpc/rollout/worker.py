"""The rollout role of a training job: an engine that follows the trainer's weights and answers its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import Task, get_domain, read_tasks
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.jobs.context import RoleContext
from evo_hpc.rollout.engine import Engine, Sampling
from evo_hpc.rollout.exchange import StepRequest, claim_batch, published, read_probe, read_request, wait_for
from evo_hpc.rollout.groups import Group, Sampler, longest_context, positions
from evo_hpc.store.atomic import write_bytes
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import write_table


def run(context: RoleContext) -> dict[str, Any]:
    """Serve steps until the job ends: the launcher stops this role when the trainer is done."""
    recipe = Recipe.model_validate(context.spec.params["recipe"])
    init = context.resolve(context.spec.params["init"])
    tasks = {task.task_id: task for task in read_tasks(context.campaign_paths.tasks("train"))}
    profile = context.cluster.engine
    tokenizer = ChatTokenizer.from_folder(init)
    longest = longest_context(
        tokenizer, tasks.values(), recipe.tool_use.system_prompt, recipe.rollout.max_response_tokens, positions(init)
    )
    engine = Engine(
        init, weight_version=-1, max_model_len=longest, kv_cache_bytes=profile.kv_cache_mib << 20,
        dtype=profile.dtype, threads=profile.threads, seed=recipe.seed,
    )
    sampler = Sampler(
        engine, tokenizer, get_domain(context.campaign.domain.name),
        Sampling(recipe.rollout.temperature, 1.0, recipe.rollout.max_response_tokens, tokenizer.eos_ids),
        recipe.reward, recipe.tool_use.system_prompt,
    )
    write_bytes(context.incarnation.effective(context.role), dump_tree({**engine.effective_config(), "start_seconds": context.seconds(), "sampling": {**asdict(sampler.sampling), "stop_token_ids": list(tokenizer.eos_ids)}}))
    serve(context, sampler, tasks, recipe.steps)


def serve(context: RoleContext, sampler: Sampler, tasks: Mapping[str, Task], steps: int) -> NoReturn:
    """Answer the trainer's requests, from the first that it posts to step `steps`.

    Ends by raising Stopped, or what the engine raises. A stop takes effect at the next completion: what was sampled of
    that batch is dropped, and sampled again after a resume.
    """
    first = _first_step(context)
    for step in range(first, steps + 1):
        _wait(context, lambda step=step: context.exchange.request(step).exists())
        request = read_request(context.exchange, step)
        for number, batch in enumerate(request.batches):
            if not claim_batch(context.exchange, step, number, context.role):
                continue
            follow(context, sampler.engine, request)
            groups = [Group(g.group_id, tasks[g.task_id], tuple(g.seeds)) for g in batch]
            common = {
                "campaign": context.spec.campaign, "version": context.spec.owner, "suite": "train",
                "policy_step": request.weight_version, "trainer_step": step, "evaluator_epoch": None,
            }
            rows = sampler.rows(groups, common, lambda finished: context.raise_if_stopped())
            write_table(context.exchange.rollouts(step, number), rows, ROLLOUT, durable=False)
    while True:  # the trainer still saves
        _wait(context, lambda: False)


def follow(context: RoleContext, engine: Engine, request: StepRequest) -> None:
    """Bring the engine to the request's weights, verified against the trainer's own log-probabilities."""
    if engine.weight_version == request.weight_version:
        return
    _wait(context, lambda: published(context.exchange, request.weight_version))
    folder = context.exchange.policy(request.weight_version)
    probe = read_probe(folder)
    assert probe is not None, f"{folder}: the trainer publishes each policy with a probe"
    error = engine.reload(folder, request.weight_version, probe_ids=probe.token_ids, probe_logprobs=probe.array())
    write_bytes(context.exchange.seen(request.weight_version), f"{error}\n".encode(), durable=False)


def _first_step(context: RoleContext) -> int:
    """The step at which the trainer (which may have resumed) begins: the first request it posts."""
    folder = context.exchange.request(1).parent
    _wait(context, lambda: any(p.suffix == ".json" and not p.name.startswith(".") for p in folder.iterdir()))
    return min(int(p.stem.split("-")[1]) for p in folder.iterdir() if not p.name.startswith("."))


def _wait(context: RoleContext, ready: Any) -> None:
    def alive() -> None:
        context.raise_if_stopped()

    wait_for(ready, alive)
