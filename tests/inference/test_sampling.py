"""What is asked of a text, before any framework."""

import pytest

from ingot.backends.sampling import GenerationOptions, Sampling, prompt_ids
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.errors import ConfigError


def test_greedy_and_temperature_0_are_the_same_and_top_k_0_is_all():
    assert GenerationOptions(greedy=True, temperature=5.0).sampling(1).temperature == 0.0
    assert GenerationOptions(temperature=0).sampling(1).temperature == 0.0
    assert GenerationOptions(temperature=1e-35).record()["do_sample"] is False  # which is 0 to the model
    assert GenerationOptions(top_k=0).sampling(1).top_k == GenerationOptions(top_k=None).sampling(1).top_k == 0


def test_text_i_has_the_seed_plus_i_and_no_seed_is_another_each_time():
    assert GenerationOptions(seed=5).sampling(3).row_seeds(3) == (5, 6, 7)
    assert Sampling(seed=5).row_seeds(3) == (5, 6, 7)
    assert GenerationOptions().sampling(1).seeds != GenerationOptions().sampling(1).seeds


def test_the_largest_seed_is_the_one_that_messages_name():
    assert GenerationOptions(seed=2**62).problems() == []
    assert "from 0 to 2**62" in GenerationOptions(seed=2**62 + 1).problems()[0]


def test_all_problems_are_told_at_once():
    options = GenerationOptions(0, -1.0, -1, 0.0, "yes", 0.0, 1.5)
    names = [problem.split()[0] for problem in options.problems()]
    assert names == ["max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "greedy"]
    with pytest.raises(ConfigError, match="must be a whole number from 1 to 100,000,000, not 0; temperature must be"):
        options.sampling(1)


def test_the_record_of_a_greedy_text_names_no_sampling():
    told = GenerationOptions(greedy=True, top_k=5, seed=1).record()
    assert told["do_sample"] is False and (told["temperature"], told["top_k"], told["top_p"]) == (1.0, None, None)
    assert GenerationOptions(top_k=5).record()["top_k"] == 5


def test_a_prompt_without_a_start_mark_is_its_own_ids_and_an_empty_one_a_new_document():
    gpt2 = GPT2Tokenizer()
    assert prompt_ids(gpt2, "Hello", start_mark=False) == gpt2.encode("Hello").tolist()
    assert prompt_ids(gpt2, "Hello") == [gpt2.bos, *gpt2.encode("Hello").tolist()]
    assert prompt_ids(gpt2, "", start_mark=False) == [gpt2.bos]
    assert prompt_ids(ByteTokenizer(), "", start_mark=False) == [ByteTokenizer().bos]


def test_more_tokens_than_make_sense_are_refused_and_not_written():
    for tokens in (10**12, 10**20):
        with pytest.raises(ConfigError, match=f"max_new_tokens must be a whole number from 1 to 100,000,000, not {tokens}"):
            GenerationOptions(max_new_tokens=tokens).sampling(1)
