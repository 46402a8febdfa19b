"""A job's spec is written field by field, and is the same file as if it were written at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.yaml_io import ConfigError, dump_model, load_model
from evo_hpc.assets import asset_dir
from evo_hpc.jobs.spec import JobSpec, _known, load_spec, spec_bytes
from evo_hpc.paths import JobPaths

PARAMS = [
    {}, {"recipe": {"reward": {"weights": {"correct": 1.0}}}, "run": "on", "init": "base/policy: x"},
    {"evaluations": [{"suite": "dev", "system_prompt": "two\nlines, ünïcode\u2028 and a tab\t"}, {"suite": "probe", "n": None}], "n": 1e-5},
]


@pytest.mark.parametrize("params", PARAMS, ids=("empty", "nested", "text"))
def test_the_fields_make_the_whole(params: dict[str, object], tmp_path: Path) -> None:
    config = load_model(asset_dir("campaigns") / "demo" / "campaign.yaml", Campaign).model_dump(mode="json")
    spec = JobSpec(
        name="evo-demo-0-v0001-train-000", kind="train", campaign="demo", owner="v0001", attempt=0, config=config,
        cluster=Cluster().model_dump(mode="json"), params=params,
    )
    job = JobPaths(tmp_path / "train-000")
    job.root.mkdir()
    for _ in range(2):  # the second time from memory
        job.spec.write_bytes(spec_bytes(spec))
        assert job.spec.read_bytes() == dump_model(spec)
        assert load_spec(job) == spec
    _known.cache_clear()  # as another process reads it
    assert load_spec(job) == spec == load_model(job.spec, JobSpec)


@pytest.mark.parametrize("change, says", [
    (lambda text: "- a list\n" + text, ":2: "), (lambda text: text.replace("attempt: 0", "attempt: none"), ":6: `attempt`: "),
    (lambda text: text + "kind: train\n", "duplicate key"), (lambda text: text.replace("owner:", "ownr:"), "ownr"), (lambda text: "", ":1: "),
    (lambda text: "# a remark\n" + text, None),
])
def test_what_is_not_as_it_was_written_is_read_as_a_whole(change: Callable[[str], str], says: str | None, tmp_path: Path) -> None:
    """And refused with file and line."""
    spec = JobSpec(name="evo", kind="train", campaign="demo", owner="v0001", attempt=0, config={}, cluster={})
    job = JobPaths(tmp_path / "train-000")
    job.root.mkdir()
    job.spec.write_text(change(spec_bytes(spec).decode()))
    if says is None:
        assert load_spec(job) == spec
        return
    with pytest.raises(ConfigError) as caught:
        load_spec(job)
    assert str(job.spec) in str(caught.value) and says in str(caught.value)
