from __future__ import annotations

import pytest
import torch.distributed as dist

from evo_hpc.config.layout import Layout, LayoutError
from evo_hpc.config.recipe import Compute
from evo_hpc.training import parallel
from evo_hpc.training.errors import ParallelError
from evo_hpc.training.parallel import Place, read_place

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "2950"}


def test_place_of_a_launcher_and_of_nobody():
    assert read_place(TWO) == Place(1, 2, 1, "tcp://node7:2950")
    assert read_place({}) == Place(0, 1, 0, None)


@pytest.mark.parametrize(
    ("env", "message"),
    [({**TWO, "RANK": "2"}, "RANK 2 is outside WORLD_SIZE 2"), ({**TWO, "MASTER_PORT": ""}, "MASTER_PORT is not set")],
)
def test_impossible_places_are_refused(env, message):
    with pytest.raises(ParallelError, match=message):
        read_place(env)


def test_one_process_needs_no_port_and_a_second_call_is_checked():
    nowhere = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    assert parallel.initialize(env=nowhere) == parallel.initialize(env=nowhere) == Layout()
    assert dist.get_world_size() == 1
    assert parallel.gather_objects({"a": 1}) == [{"a": 1}]
    with pytest.raises(LayoutError, match=r"= 2 x 1 x 1 = 2 must divide the trainer's ranks \(1\)"):
        parallel.initialize(Compute(tensor_parallel=2), env=nowhere)
    with pytest.raises(ParallelError, match="already initialised with"):
        parallel.initialize(Compute(tensor_parallel=2), env={**TWO, "RANK": "0"})
