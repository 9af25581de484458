import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import ConfigError
from ingot.runtime.ranks import Ranks, ranks_from_environment


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_the_shares_of_all_ranks_are_the_rows_in_order_and_even(rows, world_size):
    shares = [Ranks(rank, world_size).share(rows) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_is_the_first_of_one():
    ranks = ranks_from_environment({})
    assert ranks == Ranks(0, 1, 0)
    assert ranks.first


def test_torchruns_variables_are_read():
    ranks = ranks_from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert ranks == Ranks(5, 8, 1)
    assert not ranks.first


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_of_torchruns_variables_is_an_error(missing):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    del environment[missing]
    with pytest.raises(ConfigError, match=rf"{missing} is not set.*torchrun"):
        ranks_from_environment(environment)


@pytest.mark.parametrize(("rank", "world_size"), [("x", "2"), ("0", ""), ("1.5", "2")])
def test_ranks_are_whole_numbers(rank, world_size):
    with pytest.raises(ConfigError, match=r"must be whole numbers"):
        ranks_from_environment({"RANK": rank, "WORLD_SIZE": world_size})


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_outside_the_world_is_an_error(rank, world_size):
    with pytest.raises(ConfigError, match=rf"RANK={rank} must be at least 0 and less than WORLD_SIZE={world_size}"):
        ranks_from_environment({"RANK": rank, "WORLD_SIZE": world_size})
