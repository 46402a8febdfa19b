"""What the folders say: the campaign's whole state. It is read anew each time; a controller, which looks all the time, brings its
memory (controller/cache.py), by which what did not change is not read again.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as cached
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from evo_hpc.agent.proposal import Round, read_round
from evo_hpc.agent.rules import Rules, load_rules
from evo_hpc.config.layout import trainer_ranks
from evo_hpc.controller.cache import Remembered, StateCache, progressed
from evo_hpc.controller.copied import results_of_others
from evo_hpc.controller.decided import decision_problems
from evo_hpc.controller.settings import Settings, check_compute, check_domain, load_settings, model_config
from evo_hpc.controller.tasks import TasksManifest, check_task_files, domain_of, read_manifest
from evo_hpc.controller.watching import Running, read_running
from evo_hpc.dispatch.attempt import load_record
from evo_hpc.dispatch.executor import Dispatch, Observe
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.errors import EvoError, UserError
from evo_hpc.evaluation.scores import BadEvaluation, EvaluationRecord, read_evaluation
from evo_hpc.harness.analysis import Analysis, StaleAnalysis, WatchLook, read_analysis, read_watches
from evo_hpc.harness.harness import BadHarness, Found, Harness, current_harness, discover
from evo_hpc.jobs.spec import JobKind
from evo_hpc.lineage.comparison import Comparison, read_comparison
from evo_hpc.lineage.decision import BadDecision, Decision, read_decision
from evo_hpc.lineage.identity import policy_identity, run_identity
from evo_hpc.lineage.looks import Look, check_alpha, read_looks
from evo_hpc.lineage.tree import BadLineage, Node, load_nodes, load_tree_nodes, misnamed, tree_problems, with_inits
from evo_hpc.paths import COMPLETE, CampaignPaths, OwnerPaths, version_id
from evo_hpc.store.manifest import Torn, read_complete


@dataclass(frozen=True)
class VersionState:
    """One version and how far it is."""

    node: Node
    trained: bool
    """Its training run is committed (or it needs none)."""
    policy: str | None
    """Folder of the policy that is scored, relative to the campaign; null while there is none."""
    policy_identity: str | None
    init: str | None
    """Folder that its training starts from; null while there is none."""
    run: str | None
    """Identity of the training run that this folder describes; null while its init is not there."""
    evaluations: dict[str, EvaluationRecord | None]
    jobs: dict[JobKind, list[JobStatus]]
    comparisons: tuple[Comparison, ...]
    """Oldest look first."""
    running: Running | None = None
    """Its training run as far as it has got; null once it is published, and before it has started."""
    watches: tuple[WatchLook, ...] = ()
    """Earliest step first."""
    analysis: Analysis | None = None
    """What the current harness found; null while it has not looked."""
    decision: Decision | None = None

    @property
    def id(self) -> str:
        return self.node.id

    @property
    def stopped_early(self) -> WatchLook | None:
        """The look at which the futility rule stopped its training, whether or not the job has ended yet."""
        return next((look for look in self.watches if look.futile), None)

    @property
    def cancelled(self) -> bool:
        """Whether a person has ended it before it was decided."""
        return self.decision is not None and self.decision.outcome == "cancelled"

    @property
    def evaluated(self) -> bool:
        """Whether every suite has been scored."""
        return all(record is not None for record in self.evaluations.values())

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it: scored, stopped early and published, or cancelled."""
        return self.cancelled or (self.trained and (self.stopped_early is not None or self.evaluated))

    @property
    def known(self) -> bool:
        """Whether what it can teach is there: its results, and what the current harness found in them."""
        return self.over and (self.analysis is not None or self.cancelled)

    @cached_property
    def training(self) -> dict[str, Any]:
        """What its training job is told."""
        return {"recipe": self.node.recipe.model_dump(mode="json"), "run": self.run, "init": self.init}

    @cached_property
    def closed(self) -> bool:
        """Whether nothing is to be done for it: known, decided, and all its attempts recorded."""
        decided = self.decision is not None or not self.node.version.parents
        return decided and self.known and not self.unrecorded

    @cached_property
    def unrecorded(self) -> tuple[JobStatus, ...]:
        """Attempts that the controller's last word on is not written yet."""
        return tuple(status for attempts in self.jobs.values() for status in attempts if status.phase != "recorded")

    def comparison_with(self, other: VersionState) -> Comparison | None:
        """The comparison of these very evaluations of the two on dev."""
        pair = (_id(other.evaluations["dev"]), _id(self.evaluations["dev"]))
        return next((c for c in self.comparisons if c.against == other.id and c.look.evaluations == pair), None)


def _id(record: EvaluationRecord | None) -> str | None:
    return record.id if record else None


@dataclass(frozen=True)
class CampaignState:
    """Everything the planner needs."""

    paths: CampaignPaths
    settings: Settings
    tasks: TasksManifest | None
    """Null before they are made."""
    base_policy: str | None
    """Folder of the base policy, relative to the campaign; null while there is none."""
    base_jobs: dict[JobKind, list[JobStatus]]
    versions: dict[str, VersionState]
    """In the order of their ids."""
    found: Found
    """Analyzers and rules as they lie on disk now."""
    harness: Harness | None
    """The newest numbered copy of them; null before the first."""
    rounds: tuple[Round, ...]
    now: float
    """Unix time of this look."""

    @property
    def root(self) -> VersionState | None:
        """The version without RL that everything starts from."""
        return self.versions.get(version_id(0))

    def incumbent_before(self, version: str | None) -> str:
        """The version to beat when `version` is decided (None: now): the last one promoted among those with lower ids."""
        return self._incumbents.get(version, self._incumbents[None])

    @cached_property
    def _incumbents(self) -> dict[str | None, str]:
        found: dict[str | None, str] = {}
        incumbent = version_id(0)
        for name, state in self.versions.items():
            found[name] = incumbent
            if state.decision is not None and state.decision.promoted:
                incumbent = name
        found[None] = incumbent
        return found

    @cached_property
    def open(self) -> tuple[VersionState, ...]:
        """The versions for which something is to be done or awaited."""
        return tuple(version for version in self.versions.values() if not version.closed)

    @cached_property
    def unrecorded(self) -> tuple[JobStatus, ...]:
        """Attempts of all owners that the controller's last word on is not written yet."""
        base = [status for attempts in self.base_jobs.values() for status in attempts if status.phase != "recorded"]
        return (*base, *(status for version in self.open for status in version.unrecorded))

    def named(self, name: str) -> VersionState:
        """A version by its id, or by the folder that a shell completes. Raises UserError, naming those that there are."""
        name = name.rstrip("/").rpartition("/")[2]
        if name not in self.versions:
            raise UserError(f"{name}: no such version in {self.paths.root}; there are: {', '.join(self.versions) or 'none yet'}")
        return self.versions[name]

    def rules(self) -> Rules:
        """The rules of the current harness. Raises BadRules."""
        assert self.harness is not None
        return load_rules(self.harness.paths.rules)

    def all_jobs(self) -> list[JobStatus]:
        """Every attempt of every owner."""
        owners = [self.base_jobs, *(v.jobs for v in self.versions.values())]
        return [status for jobs in owners for attempts in jobs.values() for status in attempts]


def read_state(paths: CampaignPaths, *, hashes: bool = False, dispatch: Dispatch | None = None, cache: StateCache | None = None) -> CampaignState:
    """The state of a campaign; `hashes` also checks the task files' content. A controller brings its `dispatch`, which
    remembers what Slurm was asked, and its `cache`, which remembers what was read; others ask and read anew.

    Raises UserError or StoreError when a folder is damaged: the controller refuses to guess. With a cache damage to a closed
    version may be noticed some looks later (StateCache).
    """
    settings = load_settings(paths)
    dispatch = dispatch or Dispatch(settings.cluster)
    dispatch.use(settings.cluster)
    nodes = _tree(paths, cache)
    domain, _ = domain_of(paths, settings.campaign)
    for node in nodes.values() if cache is None else [nodes[name] for name in cache.changed if name in nodes]:
        check_domain(node.paths.recipe_yaml, node.recipe, domain)
    tasks = read_manifest(paths, settings.campaign)
    if tasks is not None and hashes:
        check_task_files(paths, tasks)
    base_policy = base_policy_of(paths, settings)
    looks = read_looks(paths) if cache is None else cache.read_looks(paths)
    check_alpha(paths, looks, settings.campaign.gate.alpha)
    found, harness = discover(paths), current_harness(paths)
    reader = _Reader(paths, settings, nodes, base_policy, tasks, looks, harness, dispatch)
    versions = {node.id: reader.read(node) for node in nodes.values()} if cache is None else _versions(reader, cache)
    rounds = _rounds(paths) if cache is None else cache.rounds.read(paths.round(1).parent, paths.round, lambda known: _rounds(paths, known), cache)
    state = CampaignState(
        paths=paths, settings=settings, tasks=tasks, base_policy=base_policy, base_jobs=_jobs(paths.base, "base", dispatch.observe), versions=versions,
        found=found, harness=harness, rounds=rounds, now=dispatch.now(),
    )
    if cache is not None:
        vars(state)["open"] = cache.open_states()  # as the property would find them among all
    _check_layouts(state)
    if cache is None or cache.differs(rounds, tuple(number for number, _ in paths.harnesses())):
        _check_harnesses(paths, nodes)
        if problems := list(decision_problems(state, None if cache is None else cache.decisions)):
            raise BadDecision("\n".join(problems))
        _check_authors(state)
        if cache is not None:
            cache.found_right()
    return state


def _check_layouts(state: CampaignState) -> None:
    """Raise UserError where a recipe that may still be trained asks for a parallel layout that the ranks or the model do not allow."""
    open_ones = [version for version in state.open if not version.trained]
    if not open_ones and len(state.versions) > 1:  # nothing is to be trained: a finished campaign may be read anywhere
        return
    config, ranks = model_config(state.paths, state.base_policy), trainer_ranks(state.settings.cluster)
    check_compute(state.paths.recipe_yaml, state.settings.recipe, ranks, config)
    for version in open_ones:
        check_compute(version.node.paths.recipe_yaml, version.node.recipe, ranks, config)


def _tree(paths: CampaignPaths, cache: StateCache | None) -> dict[str, Node]:
    """All versions, where each starts resolved. Raises BadLineage."""
    if cache is None:
        nodes, problems = load_tree_nodes(paths)
        if problems:
            raise BadLineage("\n".join(problems))
        return nodes
    read, problems = load_nodes(cache.look(paths))
    cache.nodes.update(read)
    problems += misnamed(paths, cache.other_names)

    def check(nodes: Mapping[str, Node]) -> dict[str, Node]:
        if found := tree_problems(paths, nodes):
            raise BadLineage("\n".join(found))
        return with_inits(nodes)

    if problems:
        raise BadLineage("\n".join(problems))
    return cache.tree(check)


def _versions(reader: _Reader, cache: StateCache) -> dict[str, VersionState]:
    """All versions: those that may have changed read, of the others what goes on in their jobs."""
    identity = None if reader.base_policy is None else cache.value(reader.paths.root / reader.base_policy, reader.identity)
    harness = reader.harness and (reader.harness.id, reader.harness.digest)
    cache.depends_on((reader.settings.campaign, reader.tasks, reader.base_policy, identity, harness))
    unread = [] if cache.versions.keys() == reader.nodes.keys() else [name for name in reader.nodes if name not in cache.versions]
    for name in tuple(cache.watched):
        each = cache.versions[name]
        if each.state.unrecorded and (again := reader.read_jobs(each)) is not each:
            cache.remember(name, again)
    while unread:
        again = [cache.read(name, partial(reader.read, reader.nodes[name])) for name in unread]
        unread = sorted(set().union(*again))
    return cache.states(reader.nodes)


def _check_harnesses(paths: CampaignPaths, nodes: dict[str, Node]) -> None:
    """Raise BadHarness when one is gone that something was found by: a new one must not get its number."""
    there = {number for number, _ in paths.harnesses()}
    for node in nodes.values():
        for number, folder in node.paths.analyses():
            if number not in there:
                raise BadHarness(f"{paths.harness(number).root}: gone, and {folder} was made by it. Restore it from a backup, or remove what it made: "
                                 f"the folders {folder.parent.name}/{folder.name} of all versions")


def _check_authors(state: CampaignState) -> None:
    """Raise BadLineage when a version says that the agent proposed it and no round does."""
    proposed = {proposal.version.id for each in state.rounds for proposal in each.proposals}
    for version in state.versions.values():
        if version.node.version.author == "agent" and version.id not in proposed:
            raise BadLineage(f"{version.node.paths.version_yaml}: says `author: agent`, but no round in {state.paths.round(1).parent} proposed it. "
                             "Restore the rounds from a backup, or write `author: person` if it is yours")


def _rounds(paths: CampaignPaths, known: Sequence[Round] = ()) -> tuple[Round, ...]:
    """All rounds, in order; the first ones, where they are `known`, are not read again.

    Raises BadLineage on a gap: what was proposed, and how many proposals are left, is no longer known.
    """
    rounds: list[Round] = []
    for expected, (number, path) in enumerate(paths.rounds(), start=1):
        if expected == number <= len(known):
            rounds.append(known[expected - 1])
            continue
        found = read_round(path)
        if (number, found.number) != (expected, expected):
            raise BadLineage(f"{path}: round {found.number} where round {expected} is expected; one was removed or renamed by hand. Restore "
                             f"{paths.round(expected)} from a backup")
        if not found.intact():
            raise BadLineage(f"{path}: edited after it was written (its digest differs). Restore it from a backup; to change a proposal edit the "
                             "version's own folder before it is trained")
        rounds.append(found)
    return tuple(rounds)


def _jobs(folder: OwnerPaths, owner: str, observe: Observe) -> dict[JobKind, list[JobStatus]]:
    jobs: dict[JobKind, list[JobStatus]] = {}
    for job in folder.jobs():
        status = observe(job)
        if status.intent is not None and status.intent.owner != owner:
            raise BadLineage(f"{job.root}: belongs to {status.intent.owner}, not to {owner}; a copied version starts without jobs/: remove it here")
        jobs.setdefault(job.kind, []).append(status)  # type: ignore[arg-type]
    return jobs


def base_policy_of(paths: CampaignPaths, settings: Settings) -> str | None:
    """Folder of the base policy, relative to the campaign; None while it is still to be made. Raises UserError."""
    choice = settings.campaign.base_model
    folder = paths.root / choice.path
    if not folder.exists():
        if choice.supervised is None:
            raise UserError(f"{paths.campaign_yaml}: base_model.path {choice.path} does not exist ({folder}). Put a Hugging Face model "
                            "folder there, or give base_model.supervised so that one is made")
        return None
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: not a model folder (no config.json); set base_model.path in {paths.campaign_yaml}")
    if (folder / COMPLETE).exists():
        try:
            read_complete(folder)
        except Torn as error:
            remedy = f" Remove {folder}: it is published again from the job that made it" if folder == paths.base.policy else ""
            raise UserError(f"{error}.{remedy}") from error
    elif folder == paths.base.policy and any((record := load_record(job)) is not None and record.state == "done" for job in paths.base.jobs()):
        raise UserError(f"{folder}: its {COMPLETE} is gone. Remove the folder: it is published again from the job that made it")
    return choice.path


class _Reader:
    """Reads versions of one campaign, as all that they depend on is at one look."""

    def __init__(
        self, paths: CampaignPaths, settings: Settings, nodes: dict[str, Node], base_policy: str | None, tasks: TasksManifest | None,
        looks: Iterable[Look], harness: Harness | None, dispatch: Dispatch,
    ) -> None:
        self.paths, self.settings, self.nodes, self.base_policy = paths, settings, nodes, base_policy
        self.tasks, self.harness, self.dispatch = tasks, harness, dispatch
        self.identity = cached(policy_identity)
        self._all_looks = looks

    @cached_property
    def _looks(self) -> frozenset[Look]:
        return frozenset(self._all_looks)

    def read(self, node: Node) -> VersionState:
        """One version. Raises UserError or StoreError when its folder is damaged."""
        try:
            return self._read(node)
        except EvoError as error:
            if brought := results_of_others(node.paths):
                raise BadLineage(f"{node.paths.root}: was copied together with results of another version ({', '.join(p.name for p in brought)}). "
                                 f"Remove them and it is trained as its own: rm -r {' '.join(shlex.quote(str(p)) for p in brought)}") from error
            raise

    def read_jobs(self, each: Remembered) -> Remembered:
        """One of which nothing changed but what its jobs do."""
        jobs = {
            kind: [status if status.phase == "recorded" else self.dispatch.observe_again(status) for status in attempts]
            for kind, attempts in each.state.jobs.items()
        }
        if all(now is before for kind, attempts in jobs.items() for now, before in zip(attempts, each.state.jobs[kind], strict=True)):
            state = each.state
        else:
            state = replace(each.state, jobs=jobs)
        if not state.trained and progressed(each, state):
            return Remembered.of(replace(state, running=read_running(self.paths.root, jobs.get("train", []), state.run)), each.taken)
        return each if state is each.state else replace(each, state=state)

    def _read(self, node: Node) -> VersionState:
        jobs = _jobs(node.paths, node.id, self.dispatch.observe)
        init = _init(self.paths, node, self.nodes, self.base_policy)
        run = None
        if init is not None and self.tasks is not None:
            run = run_identity(
                node.recipe, node.hooks, init=self.identity(self.paths.root / init), seed=self.settings.campaign.seed,
                task_set=self.tasks.splits["train"].task_set,
            )
        published = node.paths.train.exists()
        # Looks at another run are of a recipe that was edited meanwhile; while the init or the tasks are gone nobody can tell.
        watches = tuple(look for look in read_watches(node.paths) if run is None or look.run == run)
        stopped = any(look.futile for look in watches)
        if published:
            _check_training(node, run, stopped)
        policy = None
        if node.recipe.steps == 0:
            policy = init
        elif published and not stopped:
            policy = node.paths.policy(node.policy_step).relative_to(self.paths.root).as_posix()
        identity = self.identity(self.paths.root / policy) if policy else None
        evaluations = {suite: read_evaluation(node.paths, suite) for suite in self.settings.campaign.evaluation.suites}
        for suite, record in evaluations.items():
            if record is not None and identity is not None and record.policy_identity != identity:
                raise BadEvaluation(f"{node.paths.evaluation(suite)}: made of another policy than this version has now; remove it: the version is "
                                    "evaluated again")
        return VersionState(
            node=node, trained=published or node.recipe.steps == 0, policy=policy, policy_identity=identity, init=init, run=run, jobs=jobs,
            evaluations=evaluations, comparisons=tuple(_comparison(node, path, self._looks) for path in node.paths.comparisons()),
            running=None if published else read_running(self.paths.root, jobs.get("train", []), run), watches=watches,
            analysis=_analysis(node, self.harness) if self.harness else None,
            decision=read_decision(node.paths.decision_yaml) if node.paths.decision_yaml.exists() else None,
        )


def _analysis(node: Node, harness: Harness) -> Analysis | None:
    """What the harness found in the results that are there; what it found in others is made anew."""
    try:
        return read_analysis(node.paths, harness.id)
    except StaleAnalysis:
        return None


def _comparison(node: Node, path: Path, looks: Collection[Look]) -> Comparison:
    found = read_comparison(path, looks)
    if found.version != node.id:
        raise BadLineage(f"{path}: belongs to {found.version}, not to {node.id}; a copied version starts without comparisons/: remove it here")
    return found


def _check_training(node: Node, run: str | None, stopped: bool) -> None:
    """Raise UserError unless the committed training is whole, this version's, and of the recipe that stands beside it."""
    try:
        meta = read_complete(node.paths.train)["meta"]
    except Torn as error:
        raise UserError(f"{error}. Remove {node.paths.train}: it is published again from the job that made it") from error
    if meta.get("version") != node.id:
        raise BadLineage(f"{node.paths.train}: belongs to {meta.get('version')}, not to {node.id}; a copied version starts without train/: "
                         "remove it here")
    if run is not None and meta.get("run") != run:
        raise BadLineage(f"{node.paths.train}: was trained with another recipe, init, seed or training tasks than the files say now: {node.paths.recipe_yaml}, "
                         f"{node.paths.version_yaml} (init), or seed and base_model in campaign.yaml was edited after training. Restore it; "
                         f"{node.paths.effective_yaml} has the recipe that was trained. To try another, add a version under a new id")
    if run is not None and bool(meta.get("stopped_early")) != stopped:
        raise BadLineage(f"{node.paths.train}: was {'stopped early' if meta.get('stopped_early') else 'trained to the end'}, which watch/ beside it "
                         "contradicts: one of the two was changed by hand. Restore it, or train the version again: "
                         f"rm -r {' '.join(str(p) for p in sorted(node.paths.root.iterdir()) if p.is_dir() or p == node.paths.decision_yaml)}")


def _init(paths: CampaignPaths, node: Node, nodes: dict[str, Node], base_policy: str | None) -> str | None:
    if node.init == "base":
        return base_policy
    source, _, step = node.init.partition("@")
    folder = nodes[source].paths.policy(int(step))
    return folder.relative_to(paths.root).as_posix() if folder.exists() else None
