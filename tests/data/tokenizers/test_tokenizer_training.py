import json
import subprocess
import sys

import pytest
from toy_tokenizers import piece_id

from ingot.data.tokenizers import learn_vocabulary as training
from ingot.data.tokenizers import open_tokenizer
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
from ingot.errors import ConfigError, DataError

TEXT = "The cats sat on the mat, and 1234 more came to see what the noise was about.\n" * 20
SUFFIX = {"sentencepiece": ".model", "bpe": ".json"}
KINDS = pytest.mark.parametrize("kind", SUFFIX)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text(TEXT)
    return path


def train(text, kind, vocab_size=300, name="out", **settings):
    output = text.parent / f"{name}{SUFFIX[kind]}"
    return output, train_tokenizer([text], output, kind, vocab_size, **settings)


@KINDS
def test_the_file_is_the_tokenizer(text, kind):
    output, tokenizer = train(text, kind)
    assert tokenizer.vocab_size == 300
    assert open_tokenizer(str(output)).fingerprint() == tokenizer.fingerprint()
    assert tokenizer.decode(tokenizer.encode("the cats see 12")) == "the cats see 12"
    assert len(tokenizer.encode(" the cats")) < len("the cats")
    assert sorted(path.name for path in text.parent.iterdir()) == sorted(["in.txt", output.name])


@KINDS
def test_an_interruption_is_one(text, kind, monkeypatch):
    def interrupted(*_):
        yield from "abc"
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "read_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(text, kind)


@KINDS
def test_the_same_text_gives_the_same_file(text, kind):
    assert train(text, kind, name="a")[0].read_bytes() == train(text, kind, name="b")[0].read_bytes()


def test_sentencepiece_is_trained_as_golf_trains_it(text):
    _, tokenizer = train(text, "sentencepiece")
    names = [tokenizer._model.id_to_piece(i) for i in range(260)]
    assert names == ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    assert piece_id(tokenizer, "\u2581") > 260
    assert tokenizer.encode("12").tolist() == [piece_id(tokenizer, "1"), piece_id(tokenizer, "2")]  # digits stay alone
    assert not tokenizer._adds_space
    assert tokenizer.decode(tokenizer.encode("ﬁ  日")) == "fi 日"


def test_bpe_is_trained_as_gpt2s(text):
    _, tokenizer = train(text, "bpe")
    assert (tokenizer.kind, tokenizer.bos, tokenizer.lossless) == ("huggingface", 0, True)
    assert tokenizer.decode(tokenizer.encode(" ﬁ  日\n")) == " ﬁ  日\n"


@KINDS
def test_documents_longer_than_a_portion_are_learned_from_whole(text, kind, monkeypatch):
    whole = train(text, kind, name="whole")[1]
    monkeypatch.setattr(training, "PORTION", 200)
    parts = train(text, kind, name="parts")[1]
    assert len(parts.encode(TEXT)) <= 1.02 * len(whole.encode(TEXT))


@KINDS
def test_only_the_first_documents_are_read_if_so_asked(tmp_path, kind):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"body": TEXT}) + "\n" + json.dumps({"body": "zebra " * 500}) + "\n{")
    _, tokenizer = train(source, kind, documents=1, text_field="body")
    assert len(tokenizer.encode(" zebra")) > 3
    with pytest.raises(DataError, match=r"in.jsonl:3: not JSON"):
        train(source, kind, name="all", text_field="body")


def test_text_without_spaces_gives_a_model_that_knows_them(tmp_path):
    (tmp_path / "in.txt").write_text("日本語テキスト今日は" * 50)
    _, tokenizer = train(tmp_path / "in.txt", "sentencepiece", 275)
    assert tokenizer.decode(tokenizer.encode("日本 x")) == "日本 x"


@pytest.mark.parametrize("word", ["x" * 65_536, "ab." * 30_000, "㎯" * 11_000, "ab\x1f" * 33_000], ids=lambda word: word[:3])
def test_a_word_too_long_for_the_trainer_is_learned_from_in_parts(tmp_path, word):
    (tmp_path / "in.txt").write_text(f"{TEXT}\n{word}\n{TEXT}")
    text = str(tmp_path / "in.txt")
    # Where it fails it is an abort, which would end the tests too.
    program = f"""
from pathlib import Path
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
train_tokenizer([Path({text!r})], Path({text!r}).with_suffix(".model"), "sentencepiece", 320)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    tokenizer = open_tokenizer(str(tmp_path / "in.model"))
    assert tokenizer.vocab_size == 320
    assert len(tokenizer.encode(" the cats")) < len("the cats")


@KINDS
def test_progress_ends_at_the_total(text, kind):
    calls = []
    train(text, kind, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(TEXT), len(TEXT))


@KINDS
def test_more_ids_than_the_text_has_pieces_for_is_refused_with_the_most_it_has(text, kind):
    with pytest.raises(DataError, match=r"only \d+ ids, fewer than --vocab-size 60,000") as caught:
        train(text, kind, 60_000)
    most = int(str(caught.value).split("lower --vocab-size to ")[1].split()[0])
    assert sorted(path.name for path in text.parent.iterdir()) == ["in.txt"]
    assert train(text, kind, most)[1].vocab_size == most


def test_fewer_ids_than_characters_is_refused(text):
    with pytest.raises(DataError, match=r"--vocab-size 270 is too small for this text: .* need \d+; give a larger --vocab-size"):
        train(text, "sentencepiece", 270)


@KINDS
def test_text_that_holds_nothing_is_refused(tmp_path, kind):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"no documents in"):
        train(source, kind)


@KINDS
@pytest.mark.parametrize("content", [" \n\t ", "\x00", "\u200b"])
def test_text_of_nothing_but_blanks_is_refused(tmp_path, kind, content):
    (tmp_path / "in.txt").write_text(content)
    with pytest.raises(DataError) as caught:
        train(tmp_path / "in.txt", kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"output": "out.json"}, ConfigError, "--output out.json must end in .model"),
        ({"inputs": "gone.txt"}, DataError, "no input at"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(text, settings, error, said):
    inputs, output = text.parent / settings.pop("inputs", "in.txt"), text.parent / settings.pop("output", "out.model")
    with pytest.raises(error, match=said):
        train_tokenizer([inputs], output, settings.pop("kind", "sentencepiece"), 300, **settings)
    assert sorted(path.name for path in text.parent.iterdir()) == ["in.txt"]
