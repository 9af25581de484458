"""sample.py: what it prints, from whatever it is given, and what it says when it cannot."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from foreign import Foreign
from small_runs import words

from ingot.artifact.container import write_artifact
from ingot.artifact.huggingface import write_model
from ingot.backends.torch.state import model_records
from ingot.compat.nanogpt.sample import decode_ids, encode_prompt, main
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.model.registry import build
from ingot.runs.checkpoints import find_checkpoint

torch.set_num_threads(1)

DASHES = "-" * 15
LETTERS = "abcdefghij \n"


class Sampled:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def texts(self):
        """What stands between the lines of dashes, behind what the program says of itself."""
        body = re.split(r"number of parameters: .*\n", self.out)[1]
        found = body.split(f"\n{DASHES}\n")
        assert found.pop() == ""
        return found


@pytest.fixture
def sample(work, capfd):
    def call(*arguments, code=0):
        capfd.readouterr()
        found = main(["--device=cpu", "--max_new_tokens=40", "--num_samples=3", *arguments])
        out, err = capfd.readouterr()
        assert found == code, err
        return Sampled(found, out, err)

    return call


@pytest.fixture
def foreign(work):
    """out/ckpt.pt as nanoGPT wrote it; its 80 ids are more than the 12 characters of the dataset."""
    model = Foreign()
    model.save(work / "out/ckpt.pt", "_orig_mod.")
    return model


@pytest.fixture
def trained(work, train):
    """out/ after a few iterations of train.py."""
    train(words(max_iters=4, compile=False))
    return work / "out"


def test_a_checkpoint_of_nanogpt_writes_as_nanogpt_prints(foreign, sample):
    found = sample()
    assert "Loading meta from data/words/meta.pkl...\n" in found.out
    assert "number of parameters: 0.09M\n" in found.out
    assert len(found.texts) == 3 and len(set(found.texts)) == 3
    assert all(text.startswith("\n") and len(text) == 41 for text in found.texts)


def test_ids_that_pad_the_vocabulary_are_never_drawn(foreign, sample):
    found = sample("--temperature=100", "--top_k=None", "--max_new_tokens=200")
    assert set("".join(found.texts)) == set(LETTERS)


def test_the_same_seed_writes_the_same_and_another_something_else(foreign, sample):
    one, again, other = sample("--seed=5"), sample("--seed=5"), sample("--seed=6")
    assert one.texts == again.texts != other.texts


def test_more_samples_leave_the_first_ones_as_they_are(foreign, sample):
    assert sample("--num_samples=5").texts[:3] == sample().texts


def test_one_candidate_is_the_same_as_no_temperature(foreign, sample):
    greedy = sample("--temperature=0").texts
    assert greedy == sample("--top_k=1").texts
    assert len(set(greedy)) == 1


def test_a_text_goes_on_behind_the_block_size(foreign, sample):
    """The block has 32 tokens; the first of 150 are those of a shorter text."""
    long, short = sample("--max_new_tokens=150").texts, sample("--max_new_tokens=20").texts
    assert all(len(text) == 151 for text in long)
    assert [text[:21] for text in long] == short


def test_a_start_longer_than_the_block_is_read_from_its_end(foreign, sample):
    start = "abc def\n" * 30
    found = sample(f"--start={start}", "--temperature=0", "--num_samples=1")
    assert found.texts[0].startswith(start) and len(found.texts[0]) == len(start) + 40
    tail = sample(f"--start={start[-32:]}", "--temperature=0", "--num_samples=1").texts[0]
    assert found.texts[0][len(start) :] == tail[32:]


def test_the_start_can_be_a_file(foreign, sample, work):
    (work / "start.txt").write_text("\ufeffabc\ndef")  # with the mark that some editors begin a file with
    found = sample("--start=FILE:start.txt").texts
    assert found == sample("--start=abc\ndef").texts and all(text.startswith("abc\ndef") for text in found)


def test_an_empty_start_is_a_beginning(foreign, sample):
    found = sample("--start=", "--num_samples=1")
    assert len(found.texts[0]) == 40


def test_settings_for_gpus_change_nothing_on_a_cpu(foreign, sample):
    expected = sample().texts
    for argument, said in {
        "--dtype=bfloat16": "dtype=bfloat16 needs a CUDA GPU; computing in float32\n",
        "--dtype=float16": "dtype=float16 needs a CUDA GPU; computing in float32\n",
        "--compile=True": "",
        "--dtype=float32": "",
    }.items():
        found = sample(argument)
        assert (found.texts, found.err) == (expected, said)


def test_nothing_to_write_is_nothing_written(foreign, sample):
    assert sample("--num_samples=0").texts == []
    assert sample("--max_new_tokens=0").texts == ["\n"] * 3


ERRORS = {
    "--start=Zorro": (3, "not in the char vocabulary: 'Z', 'o', 'r'"),
    "--start=FILE:nowhere": (3, "nowhere cannot be read: No such file or directory"),
    "--start=FILE:out": (3, "out cannot be read: Is a directory"),
    "--out_dir=nowhere": (4, "there is no nowhere/ckpt.pt; train a model first, or name the folder of its run with --out_dir"),
    "--init_from=scratch": (2, "unknown weights 'scratch'"),
    "--temperature=-1": (2, "temperature=-1 must be a number >= 0"),
    "--max_new_tokens=-1": (2, "max_new_tokens=-1 must be a whole number >= 0"),
    "--dtype=int8": (2, "dtype=int8 must be float32, bfloat16, float16 or None"),
    "--device=abacus": (2, "device=abacus is not a device"),
    "--tempreature=1": (2, "did you mean temperature?"),
}


@pytest.mark.parametrize("argument", ERRORS)
def test_a_mistake_is_one_line_with_its_exit_code(foreign, sample, argument):
    code, said = ERRORS[argument]
    found = sample(argument, code=code)
    assert found.err.startswith("sample.py: error: ") and said in found.err
    assert len(found.err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_named(foreign, sample):
    assert "this machine has no CUDA GPU; add --device=cpu" in sample("--device=cuda", code=2).err


def test_missing_characters_are_never_taken_for_gpt2_s(foreign, sample, work):
    foreign.save(work / "out/ckpt.pt", config={"dataset": "gone"})
    said = sample(code=3).err
    assert "vocabulary of 80," in said and "data/gone/meta.pkl" in said


def test_a_dataset_with_more_characters_than_the_model_is_refused(foreign, sample, work):
    small = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 8, "bias": False, "vocab_size": 5, "dropout": 0.0}
    settings = {"layers": 1, "heads": 1, "width": 4, "context": 8, "bias": False, "vocab_size": 5, "gelu": "erf"}
    model = dict(build({"family": "gpt2", **settings}).state_dict())
    foreign.save(work / "out/ckpt.pt", model=model, model_args=small, optimizer=None)
    assert "12 tokens, but the model in out/ckpt.pt has only 5" in sample(code=3).err


def test_what_train_py_leaves_is_read_as_ckpt_run_folder_checkpoint_or_artifact(trained, sample, work):
    assert (trained / "ckpt.pt").is_file()
    expected = sample().texts
    assert all(set(text) <= set(LETTERS) for text in expected)
    (work / "data").unlink()  # the file has its characters with it
    assert sample("--out_dir=out/ckpt.pt").texts == expected
    checkpoint = find_checkpoint(trained)
    step = torch.load(trained / "ckpt.pt", weights_only=True)["iter_num"]
    if step != checkpoint.step:
        pytest.skip("the newest checkpoint is not that of ckpt.pt")
    write_artifact(work / "model.ingot", checkpoint.weights.values(), checkpoint.progress, "none", "none")
    shutil.move(trained / "ckpt.pt", work / "elsewhere.pt")
    for place in (trained, checkpoint.path, work / "model.ingot", work / "elsewhere.pt"):
        assert sample(f"--out_dir={place}").texts == expected


def test_a_damaged_ckpt_pt_is_left_as_it_is_and_the_newest_sound_checkpoint_writes(trained, sample, work):
    expected = sample().texts
    (trained / "ckpt.pt").write_bytes((trained / "ckpt.pt").read_bytes()[:5000])
    before = sorted(work.rglob("*"))
    found = sample()
    assert found.texts == expected and sorted(work.rglob("*")) == before
    assert "out/ckpt.pt is damaged" in found.err and "; out/checkpoints/step-00000005 is used instead\n" in found.err
    shutil.rmtree(trained / "checkpoints")
    assert "out/ckpt.pt is damaged" in sample(code=4).err


def test_all_may_be_drawn_where_top_k_is_none_or_0(foreign, sample):
    assert sample("--top_k=0").texts == sample("--top_k=None").texts != sample("--top_k=2").texts


def test_a_folder_with_gpt2_weights_writes_and_knows_the_end_of_a_text(sample, work):
    """The real ids on a model of almost no width, padded to 50,304 rows: those after 50,257 have no text."""
    torch.manual_seed(0)
    settings = {"family": "gpt2", "layers": 1, "heads": 1, "width": 4, "dropout": 0.0, "bias": True, "gelu": "tanh"}
    write_model(work / "mine", model_records(build({**settings, "context": 16, "vocab_size": 50304})), settings, None)
    found = sample("--init_from=./mine", "--start=<|endoftext|>Once", "--top_k=None", "--num_samples=2")
    assert found.out.count("loading weights from pretrained gpt: ./mine") == 1
    assert len(found.texts) == 2 and all(text.startswith("<|endoftext|>Once") for text in found.texts)


def test_the_end_of_a_text_is_one_token_in_and_shown_on_the_way_out():
    gpt2 = GPT2Tokenizer()
    assert encode_prompt(gpt2, "<|endoftext|>") == [50256]
    assert encode_prompt(gpt2, "a<|endoftext|>b") == [64, 50256, 65]
    assert encode_prompt(gpt2, "\n") == [198]
    assert encode_prompt(gpt2, "") == [50256]
    assert decode_ids(gpt2, [64, 50256, 65], at_start=False) == "a<|endoftext|>b"
    assert encode_prompt(ByteTokenizer(), "<|endoftext|>")[:2] == [64, 128]


def test_a_checkpoint_without_its_dataset_but_with_gpt2_s_ids_has_gpt2_s_tokenizer(foreign, sample, work):
    args = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 8, "bias": False, "vocab_size": 50304, "dropout": 0.0}
    settings = {"layers": 1, "heads": 1, "width": 4, "context": 8, "bias": False, "vocab_size": 50304, "gelu": "erf"}
    model = dict(build({"family": "gpt2", **settings}).state_dict())
    foreign.save(work / "out/ckpt.pt", model=model, model_args=args, optimizer=None, config={"dataset": "openwebtext"})
    found = sample("--temperature=0", "--num_samples=1")
    assert "No meta.pkl found, assuming GPT-2 encodings...\n" in found.out
    assert found.texts[0].startswith("\n")


def test_the_script_at_the_root_is_this_program():
    script = Path(__file__).parents[3] / "sample.py"
    assert "from ingot.compat.nanogpt.sample import main" in script.read_text()
