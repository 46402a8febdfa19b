"""A job's spec is written field by field, and is the same file as if it were written at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.yaml_io import dump_model, load_model
from evo_hpc.assets import asset_dir
from evo_hpc.jobs.spec import JobSpec, load_spec, spec_bytes
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
