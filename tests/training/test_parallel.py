from __future__ import annotations

import pytest
import torch.distributed as dist

from evo_hpc.training import parallel
from evo_hpc.training.errors import ParallelError
from evo_hpc.training.parallel import Layout, read_layout

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "2950"}


def test_layout_of_a_launcher_and_of_nobody():
    assert read_layout(TWO, 2) == Layout(1, 2, 1, "tcp://node7:2950")
    assert read_layout({}, 1) == Layout(0, 1, 0, None)


@pytest.mark.parametrize(
    ("env", "size", "message"),
    [
        ({}, 2, "tensor_parallel_size 2 must divide the world size 1"),
        (TWO, 0, "tensor_parallel_size 0"),
        ({**TWO, "RANK": "2"}, 1, "RANK 2 is outside WORLD_SIZE 2"),
        ({**TWO, "MASTER_PORT": ""}, 1, "MASTER_PORT is not set"),
    ],
)
def test_impossible_layouts_are_refused(env, size, message):
    with pytest.raises(ParallelError, match=message):
        read_layout(env, size)


def test_one_process_needs_no_port_and_a_second_call_is_checked():
    parallel.initialize(env={"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"})
    parallel.initialize()
    assert dist.get_world_size() == 1
    assert parallel.gather_objects({"a": 1}) == [{"a": 1}]
    with pytest.raises(ParallelError, match="asked for 2"):
        parallel.initialize(tensor_parallel_size=2)
