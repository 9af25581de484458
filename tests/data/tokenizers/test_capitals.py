"""Tokenizers that write capitals as marks in front of small letters."""

import string

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from ingot.artifact.gguf import vocabulary_of
from ingot.artifact.hf_tokenizer import tokenizer_json
from ingot.data.prepare.pipeline import prepare
from ingot.data.tokenizers import from_spec, open_tokenizer
from ingot.data.tokenizers.by_name import round_trips
from ingot.data.tokenizers.learn_vocabulary import train_tokenizer
from ingot.data.tokenizers.sentencepiece import DROPPED, SPACES
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.data.verify.audit import audit
from ingot.errors import ConfigError
from ingot.inference.scoring import encode_pair

TEXT = "The cats of NASA sat on the mat. They came to see what The Noise was, and 12 McDonalds. It was a cat.\n\nThe end.\n" * 40
TEXTS = st.text(st.sampled_from(string.ascii_letters + " \n.,'\u00e9\u00c9\ud55c1"), max_size=40)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capitals")
    (folder / "in.txt").write_text(TEXT)
    output = folder / "out.model"
    train_tokenizer([folder / "in.txt"], output, "sentencepiece", 340, mark_capitals=True)
    return output


@pytest.fixture(scope="module")
def tokenizer(trained):
    return open_tokenizer(str(trained))


def folded(text):
    """White space as SentencePiece leaves it."""
    return " ".join(text.split())


def test_a_word_is_the_same_piece_with_and_without_a_capital(tokenizer):
    small, large = tokenizer.encode("a the").tolist(), tokenizer.encode("a The").tolist()
    assert len(small) == 2
    assert [large[0], large[2]] == small
    assert tokenizer._model.id_to_piece(large[1]) == "\ue000"
    words = tokenizer._model.encode("mat. They", out_type=str)
    assert ".\ue000" in words  # a mark may join the sentence before


@given(TEXTS)
def test_a_text_comes_back_with_its_capitals(tokenizer, text):
    ids = tokenizer.encode(text)
    assert folded(tokenizer.decode(ids)) == folded(text)
    assert tokenizer.decode(ids) == sentencepiece.SentencePieceProcessor(model_proto=tokenizer.contents).decode(ids.tolist())


@given(TEXTS)
def test_marks_stand_for_no_bytes(tokenizer, text):
    ids = tokenizer.encode_document(text)
    assert tokenizer.target_bytes(ids[:-1], ids[1:]).sum() == len(tokenizer.decode(ids).encode())


@given(TEXTS, st.integers(1, 4))
def test_a_text_that_arrives_in_parts_is_the_whole_text(tokenizer, text, size):
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer, at_start=True)
    parts = [decoder.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*parts, decoder.finish()]) == tokenizer.decode(ids)


def test_a_mark_waits_for_its_letter(tokenizer):
    _, mark, word = tokenizer.encode("a The").tolist()
    decoder = StreamDecoder(tokenizer)
    assert (decoder.push([mark]), decoder.push([word])) == ("", " The")
    assert (decoder.push([mark]), decoder.finish()) == ("", "")
    assert not tokenizer.is_special(mark)
    assert tokenizer.decode_bytes([mark]) == b""


def test_marks_are_pieces_where_the_text_has_no_capitals(tmp_path):
    (tmp_path / "in.txt").write_text(TEXT.lower())
    tokenizer = train_tokenizer([tmp_path / "in.txt"], tmp_path / "out.model", "sentencepiece", 300, mark_capitals=True)
    ids = tokenizer.encode_document("the USA, The")
    assert tokenizer.decode(ids) == "the USA, The"
    assert tokenizer.target_bytes(ids[:-1], ids[1:]).sum() == len("the USA, The")


@pytest.mark.parametrize(
    "text",
    ["one.\r\nThe two.\r\nThe three.", "x\n\n\nThe", "x\n    The", "A.   The next.   Another.", "  The x  ", "a\x01 \u200bThe"],
)
def test_white_space_is_folded_as_without_marks(tokenizer, tmp_path, text):
    (tmp_path / "in.txt").write_text(TEXT)
    plain = train_tokenizer([tmp_path / "in.txt"], tmp_path / "out.model", "sentencepiece", 340)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == plain.decode(plain.encode(text))
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids.tolist()


def test_what_is_folded_is_what_golfs_rules_fold():
    kinds = {" ": SPACES, "": DROPPED}
    library = sentencepiece.SentencePieceNormalizer(
        rule_name="nmt_nfkc", escape_whitespaces=False, remove_extra_whitespaces=False
    )
    for code in (*range(1, 0xD800), *range(0xE002, 0x10000)):
        made = library.normalize(chr(code))
        assert [made == new for new in kinds] == [bool(kind.fullmatch(chr(code))) for kind in kinds.values()], hex(code)


def test_a_mark_does_not_reach_into_the_next_document(tokenizer):
    mark = tokenizer.encode("a The").tolist()[1]
    ids = [tokenizer.bos, mark, tokenizer.bos, *tokenizer.encode("the").tolist()]
    decoder = StreamDecoder(tokenizer, at_start=True)
    assert tokenizer.decode(ids) == "".join([*(decoder.push([token]) for token in ids), decoder.finish()]) == "the"


def test_tokens_of_another_tokenizer_are_found_however_many_capitals_there_are(tokenizer, tmp_path):
    text = "ACT ONE, SCENE TWO. ENTER KING HENRY AND HIS MEN. " * 8
    (tmp_path / "in.txt").write_text(TEXT)
    other = train_tokenizer([tmp_path / "in.txt"], tmp_path / "out.model", "sentencepiece", 330, mark_capitals=True)
    assert not round_trips(tokenizer, [tokenizer.encode_document(text)]).wrong
    assert round_trips(tokenizer, [other.encode_document(text)]).wrong


def test_tasks_score_a_continuation_with_its_capital(tokenizer):
    large, small = (encode_pair(tokenizer, "They sat on the mat.", text) for text in (" The cats", " the cats"))
    assert large != small
    assert tokenizer.decode([*large[0], *large[1]]) == "They sat on the mat. The cats"
    assert tokenizer.decode([*small[0], *small[1]]) == "They sat on the mat. the cats"


def test_marks_of_the_text_itself_make_no_capitals(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ue000b \ue001 cd")) == "ab cd"


def test_the_same_text_gives_the_same_file(trained):
    again = trained.with_name("again.model")
    train_tokenizer([trained.with_name("in.txt")], again, "sentencepiece", 340, mark_capitals=True)
    assert again.read_bytes() == trained.read_bytes()


def test_it_goes_along_as_any_other(tokenizer):
    other = from_spec(tokenizer.spec())
    assert other.fingerprint() == tokenizer.fingerprint()
    assert other.decode(tokenizer.encode("The USA")) == "The USA"


def test_prepared_folders_count_the_bytes_of_the_text(trained, tmp_path):
    summary = prepare([trained.with_name("in.txt")], tmp_path / "data", str(trained))
    counts = summary.splits["train"]
    assert 0.9 * counts.bytes < counts.piece_bytes <= counts.bytes
    findings = {finding.code for finding in audit(tmp_path / "data").findings}
    assert findings == {"overlap-ngrams"}  # a text that is one sentence, over and over


def test_formats_that_cannot_hold_marks_are_not_written(tokenizer):
    assert tokenizer_json(tokenizer) is None
    with pytest.raises(ConfigError, match="capital letters as markers"):
        vocabulary_of(tokenizer.spec(), 340)


def test_only_sentencepiece_marks_capitals(trained):
    with pytest.raises(ConfigError, match="--mark-capitals is for --kind sentencepiece"):
        train_tokenizer([trained.with_name("in.txt")], trained.with_suffix(".json"), "bpe", 300, mark_capitals=True)
