"""The step that a probe takes is one that the run would take."""

import pytest

from ingot.config.schema import Config
from ingot.preflight.validate import alone

STAGES = [{"share": 0.5, "seq_len": 256}, {"share": 0.5, "seq_len": 1024}]


@pytest.mark.parametrize(
    ("world_size", "training", "expected"),
    [
        (1, {}, "auto"),
        (8, {}, False),
        (1, {"stages": STAGES}, False),
        (1, {"stages": STAGES, "cuda_graphs": True}, True),
    ],
)
def test_a_rank_by_itself_records_passes_only_where_the_run_does(world_size, training, expected):
    settings = {"max_steps": 1, "tokens_per_step": 65536, **training}
    found = alone(Config(data={"seq_len": 1024}, training=settings), world_size).training
    assert (found.cuda_graphs, found.tokens_per_step, found.stages) == (expected, 65536 // world_size, [])
