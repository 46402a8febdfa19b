"""The harness as a numbered, hashed set: what lies on disk now, and the records of what was used."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from evo_hpc.assets import asset_dir
from evo_hpc.config.base import Config
from evo_hpc.config.yaml_io import ConfigError, dump_model, load_model
from evo_hpc.errors import UserError
from evo_hpc.harness.manifest import IGNORED, Analyzer, BadAnalyzer, files_of, load_analyzer
from evo_hpc.harness.runner import check
from evo_hpc.lineage.identity import digest
from evo_hpc.paths import COMPLETE, AnalyzerPaths, CampaignPaths, HarnessPaths, harness_id
from evo_hpc.store.atomic import StoreError
from evo_hpc.store.manifest import publish_folder, read_complete, sha256


class BadHarness(UserError):
    """Analyzers that are no set, or a numbered harness that is not what it was."""


class HarnessManifest(Config):
    """`harness.yaml`: what a numbered harness holds, by content."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    id: str
    """Equal to the folder's name."""
    previous: str | None
    """The harness before it."""
    added: list[str] = Field(default_factory=list)
    """Analyzers that the previous one lacks."""
    changed: list[str] = Field(default_factory=list)
    """Analyzers of other content than before; `rules` when the rules changed."""
    removed: list[str] = Field(default_factory=list)
    """Analyzers that only the previous one has."""
    analyzers: dict[str, str]
    """Hash of the content of each."""
    rules: str
    """Hash of rules.yaml."""
    digest: str
    """Hash of all of it: two harnesses of one digest are the same."""


@dataclass(frozen=True)
class Found:
    """The harness that a campaign's files make up now: the built-in analyzers, the campaign's own over them, the rules."""

    folders: Mapping[str, AnalyzerPaths]
    """Of each analyzer, by name, in order."""
    hashes: Mapping[str, str]
    """Of their contents."""
    rules: Path
    rules_hash: str

    @property
    def analyzers(self) -> list[Analyzer]:
        """The analyzers, read now, in order of names. Raises BadAnalyzer with all that is wrong with any of them."""
        return _load(self.folders.values())

    @property
    def digest(self) -> str:
        return _digest(self.hashes, self.rules_hash)


@dataclass(frozen=True)
class Harness:
    """A numbered harness, its copies checked."""

    number: int
    paths: HarnessPaths
    manifest: HarnessManifest

    @property
    def id(self) -> str:
        return self.manifest.id

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def rules(self) -> Path:
        return self.paths.rules

    def analyzers(self, *, live: bool = False) -> list[Analyzer]:
        """The analyzers, in order of names; only those of the live watch with `live`. Raises BadAnalyzer."""
        loaded = _load(self.paths.analyzer(name) for name in sorted(self.manifest.analyzers))
        return [analyzer for analyzer in loaded if analyzer.manifest.live or not live]

    def finding_ids(self, *, live: bool = False) -> set[str]:
        """Every finding that it can make, in full; what `watch.stop_on` may name with `live`."""
        return {each for analyzer in self.analyzers(live=live) for each in analyzer.finding_ids}


def discover(campaign: CampaignPaths) -> Found:
    """What is on disk now. A folder in the campaign's analyzers/ is added, or replaces the built-in one of its name.

    Reads and hashes files; nothing of them is parsed or run. Raises BadHarness on what is neither an analyzer nor ignored.
    """
    built_in = asset_dir("analyzers")
    default_rules = HarnessPaths(built_in).rules
    analyzers = {**_folders(built_in, allowed=(default_rules.name,)), **_folders(campaign.analyzers_folder)}
    rules = campaign.rules_yaml if campaign.rules_yaml.exists() else default_rules
    if not rules.is_file():
        raise BadHarness(f"{rules}: missing; install again from a complete checkout, or write the campaign's own as {campaign.rules_yaml}")
    ordered = dict(sorted(analyzers.items()))
    return Found(ordered, {name: content_hash(paths) for name, paths in ordered.items()}, rules, sha256(rules))


def content_hash(paths: AnalyzerPaths) -> str:
    """Hash of an analyzer's files, names and contents. Raises BadAnalyzer on a folder inside it."""
    return digest([(file.name, sha256(file)) for file in files_of(paths.root)])


def current_harness(campaign: CampaignPaths) -> Harness | None:
    """The newest one, checked. Raises BadHarness."""
    numbered = campaign.harnesses()
    return _read(campaign, *numbered[-1]) if numbered else None


def read_harnesses(campaign: CampaignPaths) -> list[Harness]:
    """All of them, oldest first, checked. Raises BadHarness."""
    return [_read(campaign, number, paths) for number, paths in campaign.harnesses()]


def make_harness(campaign: CampaignPaths, found: Found, number: int, *, while_waiting: Callable[[], None] | None = None) -> Harness:
    """Load everything of `found`, try out the campaign's own analyzers, then publish it all as the number-th harness, at once.

    The built-in ones are tried out by the tests. Raises BadAnalyzer where one does not work: then nothing is published.
    Doing it again changes nothing.
    """
    paths, built_in = campaign.harness(number), asset_dir("analyzers")
    check([each for each in found.analyzers if each.paths.root.parent != built_in], while_waiting=while_waiting)
    earlier = [(n, each) for n, each in campaign.harnesses() if n < number]
    previous = _read(campaign, *earlier[-1]) if earlier else None
    manifest = _manifest(found, harness_id(number), previous.manifest if previous else None)
    with tempfile.TemporaryDirectory(prefix="evo-harness-") as scratch:
        staged = HarnessPaths(Path(scratch))
        files = {staged.rules: found.rules}
        files |= {staged.analyzer(name).root / file.name: file for name, each in found.folders.items() for file in files_of(each.root)}
        for target, source in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)  # a copy, never a link: the source goes on being edited
        staged.manifest.write_bytes(dump_model(manifest))
        everything = {target.relative_to(staged.root).as_posix(): target for target in (*files, staged.manifest)}
        publish_folder(paths.root, everything, {"id": manifest.id, "digest": manifest.digest})
    made = _read(campaign, number, paths)
    if made.digest != found.digest:
        raise BadHarness(f"{paths.root}: the analyzers or rules changed while this harness was made of them; run again")
    return made


def _manifest(found: Found, name: str, previous: HarnessManifest | None) -> HarnessManifest:
    before = previous.analyzers if previous else {}
    changed = [each for each in found.hashes if each in before and before[each] != found.hashes[each]]
    return HarnessManifest(
        id=name, previous=previous.id if previous else None, added=[each for each in found.hashes if each not in before],
        changed=[*changed, *(["rules"] if previous and previous.rules != found.rules_hash else [])],
        removed=[each for each in before if each not in found.hashes],
        analyzers=dict(found.hashes), rules=found.rules_hash, digest=found.digest,
    )


def _load(folders: Iterable[AnalyzerPaths]) -> list[Analyzer]:
    loaded, problems = [], []
    for paths in folders:
        try:
            loaded.append(load_analyzer(paths.root))
        except BadAnalyzer as error:
            problems.append(str(error))
    if problems:
        raise BadAnalyzer("\n".join(problems))
    return loaded


def _digest(hashes: Mapping[str, str], rules: str) -> str:
    return digest({"analyzers": dict(hashes), "rules": rules})


def _folders(folder: Path, allowed: tuple[str, ...] = ()) -> dict[str, AnalyzerPaths]:
    if folder.exists() and not folder.is_dir():
        raise BadHarness(f"{folder}: is a file, where the folder of the campaign's own analyzers belongs; remove it")
    if not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (*IGNORED, *allowed):
            continue
        if not path.is_dir():
            raise BadHarness(f"{path}: not an analyzer; analyzers are folders, one each with its analyzer.yaml (and rules.yaml lies in "
                             "the campaign's own folder): move it or remove it")
        if not files_of(path):
            raise BadHarness(f"{path}: an empty folder among the analyzers; put analyzer.yaml and its templates there, or remove it")
        found[path.name] = AnalyzerPaths(path)
    return found


def _read(campaign: CampaignPaths, number: int, paths: HarnessPaths) -> Harness:
    advice = (f"A numbered harness is the record of what was used and is never edited: restore it. Your own analyzers go into "
              f"{campaign.analyzers_folder}, your own rules into {campaign.rules_yaml}; the next harness is made of them.")
    try:
        read_complete(paths.root, hashes=True)
        manifest = load_model(paths.manifest, HarnessManifest)
        names = {each.name: each for each in sorted(paths.analyzers_folder.iterdir())}
        hashes = {name: content_hash(AnalyzerPaths(each)) for name, each in names.items() if each.is_dir()}
    except (StoreError, ConfigError, OSError) as error:
        raise BadHarness(f"{paths.root}: not what was written ({error}). {advice}") from error
    if manifest.id != paths.id:
        raise BadHarness(f"{paths.manifest}: belongs to {manifest.id}, not to {paths.id}. {advice}")
    recorded = (manifest.analyzers, manifest.rules, manifest.digest)
    if set(names) != set(manifest.analyzers) or (hashes, sha256(paths.rules), _digest(hashes, sha256(paths.rules))) != recorded:
        differing = sorted(name for name in {*names, *manifest.analyzers} if hashes.get(name) != manifest.analyzers.get(name)) or [paths.rules.name]
        raise BadHarness(f"{paths.root}: {', '.join(differing)} not as {paths.manifest.name} and {COMPLETE} record it. {advice}")
    return Harness(number, paths, manifest)
