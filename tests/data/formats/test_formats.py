import os
import pickle
import struct
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_files import write_shard

from ingot.data.formats.convert import FileLayout, PairWriter, StreamWriter, with_marks
from ingot.data.formats.gpt_simple_folder import Pair, index_bytes, read_index, token_width
from ingot.data.formats.nanogpt_folder import META, char_tokenizer, meta_bytes, read_meta
from ingot.data.formats.opener import detect, open_tokens
from ingot.data.store.documents import Marks, cut
from ingot.data.store.shards import TokenStream, TokenWriter, open_plain, open_shard
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer
from ingot.errors import ConfigError, DataError

MARK = 7
BODY = st.lists(st.integers(0, 0xFFFF).filter(lambda token: token != MARK), max_size=20)
BODIES = st.lists(BODY, max_size=8)


def ids(*tokens):
    return np.array(tokens, np.uint16)


def listed(documents):
    return [[int(token) for part in document for token in part] for document in documents]


def documents_of(source, split, marks):
    return [document for _, documents in source.split(split).bucket_documents(marks) for document in listed(documents)]


def array_stream(*arrays):
    arrays = [np.asarray(array) for array in arrays]
    return TokenStream(list(range(len(arrays))), list(map(len, arrays)), lambda number: arrays[number])


def refused(message, call, *given, error=DataError):
    with pytest.raises(error) as caught:
        call(*given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Streams and the documents in them


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5), st.data())
def test_a_stream_is_its_files_one_behind_the_other(arrays, data):
    whole = [token for array in arrays for token in array]
    stream = array_stream(*(np.array(array, np.uint16) for array in arrays))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert [int(token) for part in stream.slice(start, stop) for token in part] == whole[start:stop]
    assert list(stream.positions(3)) == [place for place, token in enumerate(whole) if token == 3]


@given(BODIES, st.booleans(), st.integers(1, 5))
def test_marks_in_front_or_behind_give_the_same_documents(bodies, behind, size):
    flat = [token for body in bodies for token in ([*body, MARK] if behind else [MARK, *body])]
    stream = array_stream(*(np.array(flat[start : start + size], np.uint16) for start in range(0, len(flat), size)))
    assert listed(cut(stream, Marks(MARK, MARK), ends_first=behind)) == bodies


@pytest.mark.parametrize(
    ("tokens", "marks", "documents"),
    [
        ([1, 2, 3], Marks(), [[1, 2, 3]]),
        ([1, 2, 3], Marks(9, 9), [[1, 2, 3]]),
        ([1, 9, 2], Marks(9, 9), [[1], [2]]),
        ([1, 9, 2, 9], Marks(9, 9), [[1], [2]]),
        ([9, 1, 9, 2], Marks(9, 9), [[1], [2]]),
        ([8, 1, 8, 2, 9], Marks(8, 9), [[1], [2, 9]]),
        ([1, 9, 2, 9], Marks(8, 9), [[1], [2]]),
        ([], Marks(9, 9), []),
    ],
)
def test_where_documents_are_cut(tokens, marks, documents):
    assert listed(cut(array_stream(np.array(tokens, np.uint16)), marks, ends_first=False)) == documents


def test_ids_that_do_not_fit_16_bits_are_refused_where_they_are_read():
    stream = array_stream(np.array([1, 65535, 65536], np.uint32))
    assert listed([stream.slice(0, 2)]) == [[1, 65535]]
    refused("contains token 65,536: ids above 65,535 do not fit", stream.slice, 0, 3)


# What a folder holds


def folder_of(path, **files):
    for name, contents in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents)
    return path


def shard_bytes(tokens, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.array(tokens, dtype).tobytes()


PAIR = {"a.bin": ids(1, 2, 3).tobytes(), "a.idx": index_bytes([0, 3], [0], 2)}


@pytest.mark.parametrize(
    ("files", "format"),
    [
        ({"train.bin": b"\1\0"}, "nanogpt"),
        ({"val.bin": b"\1\0", "input.txt": b"x"}, "nanogpt"),
        ({"train.bin": shard_bytes([1])}, "shards"),
        ({"tiny_train.bin": shard_bytes([1], 20240801, 7, "<u4")}, "shards"),
        ({f"train/web/{name}": contents for name, contents in PAIR.items()}, "gpt-simple"),
        (PAIR, "gpt-simple"),
    ],
)
def test_the_format_of_a_folder_is_found(tmp_path, files, format):
    folder_of(tmp_path, **files)
    assert detect(tmp_path) == format
    assert open_tokens(tmp_path).format == format


def test_a_single_file_is_enough(tmp_path):
    folder_of(tmp_path, **PAIR, **{"val.bin": b"\1\0", "x.bin": shard_bytes([1, 2])})
    assert [open_tokens(tmp_path / name).format for name in ("a.bin", "a.idx", "val.bin", "x.bin")] == [
        "gpt-simple", "gpt-simple", "nanogpt", "shards",
    ]  # fmt: skip
    assert open_tokens(tmp_path / "val.bin").tokens == {"val": 1}


def test_what_cannot_be_told_is_refused_and_says_what_to_do(tmp_path):
    refused("there is no such file or folder; give a path to dataset.json, train.bin", open_tokens, tmp_path / "gone")
    refused("no token data at", open_tokens, tmp_path)
    folder_of(tmp_path, **{"a.txt": b"x"})
    refused("holds text (a.txt) and no tokens; prepare it with: ingot data prepare --input", open_tokens, tmp_path)
    folder_of(tmp_path / "b", **{"x.bin": shard_bytes([1] * 99, magic=1)})
    refused("give --from nanogpt", open_tokens, tmp_path / "b")
    refused("give --from nanogpt", open_tokens, tmp_path / "b/x.bin")
    refused("unknown format 'llm'; choose one of ingot, nanogpt", open_tokens, tmp_path, "llm", error=ConfigError)


# nanoGPT


@given(BODIES, st.booleans())
def test_nanogpt_files_give_back_what_was_written(tmp_path_factory, bodies, marked):
    folder, marks = tmp_path_factory.mktemp("nano"), Marks(MARK, MARK) if marked else Marks()
    with ExitStack() as files:
        writer = StreamWriter(1 << 62, lambda _: TokenWriter(folder / "train.bin", files))
        for body in bodies:
            writer.add_document(with_marks([ids(*body[:3]), ids(*body[3:])], Marks(eos=marks.eos)))
        writer.close()
    flat = [token for body in bodies for token in (*body, *([MARK] if marked else []))]
    if not flat:
        assert not list(folder.iterdir())
        return
    assert (folder / "train.bin").read_bytes() == np.array(flat, "<u2").tobytes()
    assert list(open_plain(folder / "train.bin")) == flat
    assert (writer.state.tokens, writer.state.documents) == (len(flat), len(bodies) if marked else sum(map(bool, bodies)))
    assert documents_of(open_tokens(folder, "nanogpt"), "train", marks) == (bodies if marked else [flat])


def test_a_nanogpt_file_with_half_a_token_is_refused(tmp_path):
    folder_of(tmp_path, **{"train.bin": b"\1\0\2"})
    refused("has 3 bytes, an odd number", open_tokens, tmp_path)
    refused("has neither train.bin nor val.bin", open_tokens, folder_of(tmp_path / "b", x=b""), "nanogpt")


@given(st.sets(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_meta_is_what_nanogpt_writes_and_reads(tmp_path_factory, characters):
    chars = sorted(characters)
    tables = {"itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    path = tmp_path_factory.mktemp("meta") / META
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"vocab_size": len(chars), **tables}, protocol))
        tokenizer = char_tokenizer(path)
        assert tokenizer.characters == "".join(chars)
        assert pickle.loads(meta_bytes(tokenizer)) == {"vocab_size": len(chars), **tables}


def test_meta_of_other_vocabularies_lets_sample_py_encode_and_decode():
    meta = pickle.loads(meta_bytes(ByteTokenizer()))
    assert meta["vocab_size"] == len(meta["itos"]) == 260
    assert "".join(meta["itos"][meta["stoi"][character]] for character in "Hello, you!\n") == "Hello, you!\n"


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile_pickles(path):
    command = f"touch {path}".encode()
    yield pickle.dumps(Hostile(path))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps({"vocab_size": 2, "stoi": {}, "itos": Hostile(path)}, protocol)
    yield b"cposix\nsystem\n(S'" + command + b"'\ntR."
    yield b"(S'" + command + b"'\niposix\nsystem\n."
    yield b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R."
    yield b"cbuiltins\neval\n(S'1'\ntR."
    yield b"\x80\x02\x82\x01."  # a global by its number
    yield b"Pname\n."


def test_a_hostile_meta_is_refused_and_nothing_is_executed(tmp_path):
    proof = tmp_path / "executed"
    pickles = list(hostile_pickles(proof))
    for contents in pickles:
        path = folder_of(tmp_path, **{META: contents, "train.bin": b"\1\0"}) / META
        refused("it is damaged or not nanoGPT's", read_meta, path)
        refused("it is damaged or not nanoGPT's", open_tokens, tmp_path)
        assert not proof.exists()
    pickle.loads(pickles[1])  # they would do it
    assert proof.exists()


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (b"", "it is damaged or not nanoGPT's"),
        (b"\x80\x04", "it is damaged or not nanoGPT's"),
        (pickle.dumps({"vocab_size": 3})[:-4], "it is damaged or not nanoGPT's"),
        (pickle.dumps([1]), "has no vocab_size"),
        (pickle.dumps({"stoi": {}}), "has no vocab_size"),
        (pickle.dumps({"vocab_size": True}), "has no vocab_size"),
        (pickle.dumps({"vocab_size": 2, "stoi": {"a": 1}, "itos": {0: "a"}}), "vocab_size, stoi and itos are inconsistent"),
    ],
)
def test_a_damaged_meta_is_refused(tmp_path, contents, problem):
    refused(problem, char_tokenizer, folder_of(tmp_path, **{META: contents}) / META)


@pytest.mark.parametrize(
    "meta",
    [
        {"vocab_size": 50304},
        {"vocab_size": 2, "stoi": {"b": 0, "a": 1}, "itos": {0: "b", 1: "a"}},
        {"vocab_size": 2, "stoi": {"a": 0, "bc": 1}, "itos": {0: "a", 1: "bc"}},
        {"vocab_size": 1, "stoi": {"\ud800": 0}, "itos": {0: "\ud800"}},
        {"vocab_size": 1, "stoi": {0: 0}, "itos": {0: 0}},
        {"vocab_size": 0, "stoi": {}, "itos": {}},
    ],
)
def test_a_meta_that_is_no_list_of_sorted_characters_gives_no_tokenizer(tmp_path, meta):
    path = tmp_path / META
    path.write_bytes(pickle.dumps({**meta}, 4))
    assert char_tokenizer(path) is None


# Shards


@given(BODIES, st.integers(1, 30))
def test_shards_give_back_what_was_written_wherever_files_end(tmp_path_factory, bodies, limit):
    folder = tmp_path_factory.mktemp("shards")
    with ExitStack() as files:
        writer = StreamWriter(limit, lambda n: TokenWriter(folder / f"fineweb_train_{n:06d}.bin", files, header=True))
        for body in bodies:
            writer.add_document(with_marks([ids(*body)], Marks(bos=MARK)))
        writer.close()
    if not bodies:
        return
    flat = [token for body in bodies for token in (MARK, *body)]
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"fineweb_train_{n:06d}.bin" for n in range(-(-len(flat) // limit))]
    assert [int(token) for path in paths for token in open_shard(path)] == flat
    assert (writer.state.documents, writer.state.tokens) == (len(bodies), len(flat))
    assert documents_of(open_tokens(folder), "train", Marks(MARK, MARK)) == bodies


def test_names_of_shards_say_their_split_and_byte_counts_are_no_tokens(tmp_path):
    names = ("fineweb_val_000000", "fineweb_train_000001", "fineweb_train_000002", "fineweb_val_bytes_000000", "x_test")
    for number, name in enumerate(names):
        write_shard(tmp_path / f"{name}.bin", ids(MARK, number))
    source = open_tokens(tmp_path)
    assert source.about == "2 training and 1 validation shards, 2 skipped"
    assert documents_of(source, "train", Marks(MARK, MARK)) == [[1], [2]]
    assert documents_of(source, "val", Marks(MARK, MARK)) == [[0]]


def test_shards_with_32_bits_are_read(tmp_path):
    path = folder_of(tmp_path, **{"a_train.bin": shard_bytes([MARK, 65535, 3], 20240801, 7, "<u4")}) / "a_train.bin"
    assert documents_of(open_tokens(path), "train", Marks(MARK, MARK)) == [[65535, 3]]
    for magic, version in ((20240801, 7), (20240520, 2)):
        path.write_bytes(shard_bytes([MARK, 128000], magic, version, "<u4"))
        assert documents_of(open_tokens(path), "train", Marks(MARK, MARK)) == [[128000]]


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (shard_bytes([1, 2], magic=20240521), "has magic 20240521"),
        (shard_bytes([1, 2], version=3), "and version 3, which no supported format has"),
        (shard_bytes([1, 2], version=2), "it is cut short"),
        (shard_bytes([1, 2])[:100], "of a header: it is cut short or not a shard"),
        (b"", "of a header: it is cut short or not a shard"),
        (shard_bytes([1, 2], count=3), "it is cut short"),
        (shard_bytes([1, 2], count=-1), "it is too long"),
        (shard_bytes([1, 2], 20240801, 1, "<u4"), "magic 20240801 and version 1, which"),
        (shard_bytes([1, 2], 20240801, 7, "<u2"), "it is cut short"),
        (shard_bytes([1, 2], 20240801, 7, "<u4")[:-1], "it is cut short"),
        (shard_bytes([1, 2], 20240801, 7, "<u4")[:99], "of a header: it is cut short or not a shard"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path, contents, problem):
    refused(problem, open_tokens, folder_of(tmp_path, **{"a.bin": contents}), "shards")


# gpt-simple


def write_pairs(folder, bodies, eos=MARK, width=2, **layout):
    with ExitStack() as files:
        writer = PairWriter(folder, files, FileLayout(**layout), width)
        for body in bodies:
            writer.add_document(with_marks([ids(*body)] if body else [], Marks(eos=eos)))
        writer.close()
    return writer


def test_an_index_is_written_to_the_byte(tmp_path):
    write_pairs(tmp_path, [[1] * 5, [2] * 7, [3] * 2], eos=None)
    index = (tmp_path / "00000.idx").read_bytes()
    assert index[:16] == b"GPTS" + struct.pack("<III", 1, 2, 3)
    assert struct.unpack("<4q", index[16:48]) == (0, 5, 12, 14)
    assert index[48:] == bytes(6)
    assert len(index) == 54
    assert (tmp_path / "00000.bin").read_bytes() == ids(*[1] * 5, *[2] * 7, *[3] * 2).tobytes()


def test_the_vocabulary_decides_how_wide_tokens_are(tmp_path):
    assert [token_width(size) for size in (260, 50258, 65535, 65536)] == [2, 2, 2, 4]
    write_pairs(tmp_path, [[1, 65535]], width=4)
    assert (tmp_path / "00000.bin").read_bytes() == np.array([1, 65535, MARK], "<u4").tobytes()
    assert listed(Pair(tmp_path / "00000.bin").documents(MARK)) == [[1, 65535]]


@given(BODIES, st.integers(1, 9), st.integers(0, 4), st.integers(1, 30), st.sampled_from([2, 4]))
def test_pairs_give_back_what_was_written_wherever_windows_end(tmp_path_factory, bodies, max_length, overlap, limit, width):
    folder = tmp_path_factory.mktemp("pairs")
    layout = {"max_length": max_length, "overlap": min(overlap, max_length // 2), "shard_tokens": limit, "width": width}
    writer = write_pairs(folder / "train/web", bodies, **layout)
    if not bodies:
        return
    pairs = [Pair(path) for path in sorted(folder.rglob("*.bin"))]
    assert max(int(np.diff(pair.offsets).max()) for pair in pairs) <= max_length
    assert sum(pair.tokens for pair in pairs) == writer.state.tokens == open_tokens(folder).tokens["train"]
    assert documents_of(open_tokens(folder), "train", Marks(None, MARK)) == bodies


def original_windows(tokens, eod, max_length, overlap):
    """How gpt-simple itself cuts a document: it also repeats the end of one that has ended."""
    if len(tokens) < max_length:
        return [([*tokens, eod], 0)]
    stride, windows = max(max_length - overlap, max_length // 2), []
    for start in range(0, len(tokens), stride):
        window = tokens[start : start + max_length]
        repeats = min(overlap, len(window)) if start else 0
        windows.append((window + [eod] * (start + max_length >= len(tokens)), repeats))
    return windows


def write_windows(path, windows, width=2):
    offsets = [0, *np.cumsum([len(window) for window, _ in windows]).tolist()]
    path.with_suffix(".idx").write_bytes(index_bytes(offsets, [repeats for _, repeats in windows], width))
    path.write_bytes(np.array([token for window, _ in windows for token in window], f"<u{width}").tobytes())
    return path


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4), st.integers(2, 9), st.integers(0, 12)
)
def test_windows_of_gpt_simple_become_documents_with_every_token_once(tmp_path_factory, bodies, max_length, overlap):
    windows = [window for body in bodies for window in original_windows(body, MARK, max_length, overlap)]
    path = write_windows(tmp_path_factory.mktemp("windows") / "a.bin", windows)
    assert listed(Pair(path).documents(MARK)) == bodies


def test_documents_of_an_index_are_kept_apart_where_nothing_marks_their_ends(tmp_path):
    path = write_windows(tmp_path / "a.bin", [([1, 2], 0), ([3, 4, 5], 0), ([4, 5, 6], 2)])
    assert listed(Pair(path).documents(None)) == listed(Pair(path).documents(MARK)) == [[1, 2], [3, 4, 5, 6]]


def test_buckets_and_splits_are_folders(tmp_path):
    for name, token in (("train/web", 1), ("train/books", 2), ("val/web", 3), ("val/books", 4)):
        write_pairs(tmp_path / name, [[token]])
    source = open_tokens(tmp_path)
    assert source.about == "gpt-simple's .bin and .idx, 4 pairs, buckets: books, web"
    assert documents_of(source, "train", Marks(None, MARK)) == [[2], [1]]
    assert documents_of(source, "val", Marks(None, MARK)) == [[4], [3]]
    assert documents_of(open_tokens(tmp_path / "train/web"), "train", Marks(None, MARK)) == [[1]]


def test_ids_above_16_bits_in_a_pair_are_read(tmp_path):
    path = write_windows(tmp_path / "a.bin", [([1, 70000, MARK], 0)], width=4)
    assert listed(Pair(path).documents(MARK)) == [[1, 70000]]


GOOD = index_bytes([0, 3, 5], [0, 1], 2)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (b"GPTX" + GOOD[4:], "unexpected header in"),
        (GOOD[:4] + struct.pack("<I", 2) + GOOD[8:], "version 2"),
        (GOOD[:8] + struct.pack("<I", 3) + GOOD[12:], "3 bytes per token"),
        (b"", "0 bytes instead of 16"),
        (GOOD[:15], "15 bytes instead of 16"),
        (GOOD[:-1], "44 bytes expected for 2 windows, 43 found"),
        (GOOD + b"\0", "size mismatch in"),
        (GOOD[:12] + struct.pack("<I", 3) + GOOD[16:], "size mismatch in"),
        (GOOD[:12] + struct.pack("<I", 2**32 - 1) + GOOD[16:], "size mismatch in"),
        (index_bytes([0, 5, 5], [0, 0], 2), "offsets do not increase from 0"),
        (index_bytes([0, 6, 5], [0, 0], 2), "offsets do not increase from 0"),
        (index_bytes([1, 3, 5], [0, 0], 2), "offsets do not increase from 0"),
        (index_bytes([0, 3, 5], [0, 3], 2), "repeats more tokens than it has"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, index, problem):
    path = tmp_path / "a.idx"
    path.write_bytes(index)
    refused(problem, read_index, path)


def test_a_pair_that_does_not_belong_together_is_refused(tmp_path):
    path = write_windows(tmp_path / "a.bin", [([1, 2, 3], 0), ([2, 3, 4], 2)])
    path.write_bytes(ids(1, 2, 3, 2, 3).tobytes())
    refused("size mismatch in", open_tokens, tmp_path)
    path.unlink()
    refused("cannot read", open_tokens, tmp_path)
    write_windows(path, [([1, 2, 3], 0), ([9, 3, 4], 2)])
    refused("window 1 does not begin with the last 2 tokens of the previous window", listed, Pair(path).documents(MARK))
    write_windows(path, [([1, 2, 3], 1)])
    refused("window 0 does not begin with the last 1 tokens of the previous window", listed, Pair(path).documents(MARK))
    folder_of(tmp_path, **{"b.bin": b"\1\0"})
    refused("cannot read", open_tokens, tmp_path)


@pytest.mark.parametrize(("max_length", "overlap"), [(10, 6), (10, -1), (0, 0), (1 << 20, 1 << 17)])
def test_windows_that_overlap_by_more_than_half_are_not_written(tmp_path, max_length, overlap):
    refused("does not fit windows", lambda: write_pairs(tmp_path, [], max_length=max_length, overlap=overlap), error=ConfigError)


def test_the_characters_of_a_folder_are_its_tokenizer(tmp_path):
    folder_of(tmp_path, **{"train.bin": ids(0, 1).tobytes(), META: meta_bytes(CharTokenizer("ab"))})
    source = open_tokens(tmp_path)
    assert source.tokenizer.spec() == {"kind": "char", "characters": "ab"}
    assert source.about == "nanoGPT's train.bin with meta.pkl (2 characters)"
