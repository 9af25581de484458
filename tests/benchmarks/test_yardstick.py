"""The yardstick's corpus is the prose of packages, each line once; its table says how the arms compare."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import zipfile

import pytest
import yardstick
from yardstick import ARMS, LONGEST, cut, prose, table, text_of

from ingot.config.loading import load_config

FIRST, SECOND = "It is one of the long lines of prose", "that a reader of this package meets in all of its pages."
SAID = f"{FIRST} {SECOND}"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.html", f"<head>it is in the head</head><p>{FIRST}\n<b>{SECOND}</b></p><pre>x = 1</pre>".encode()),
        ("usr/share/man/man1/a.1", ".TH A 1\n\\fBIt\\fR" + f"{FIRST[2:]}\n{SECOND}\n.SH NEXT\n"),
        ("a.json", json.dumps({"shapes": [{"documentation": f"<p>{SAID}</p>", "type": "list"}]}).encode()),
        ("a.py", f'def f():\n    """{FIRST}\n    {SECOND}\n\n    :param x: a number\n    """\n    return 1'.encode()),
        ("a.txt", f"Title\n\n{FIRST}\n{SECOND}\n".encode()),
    ],
    ids=["web page", "manual page", "JSON", "docstrings", "text"],
)
def test_paragraphs_are_found_in_every_format(name, data):
    data = data if isinstance(data, bytes) else data.encode()
    assert prose(text_of(name, data), set()) == [SAID]


def test_lines_that_were_seen_are_short_or_are_not_english_are_left_out():
    other = SAID.replace("long", "short")
    seen = set()
    assert prose(f"{SAID}\nthe short one\n{SAID}\n{'xyz ' * 30}\n{other}", seen) == [SAID, other]
    assert prose(f"{other}\n{SAID}", seen) == []


def test_long_documents_are_cut_at_lines_and_short_ones_left_out():
    lines = [f"{number} {SAID}" for number in range(2000)]
    documents = list(cut(lines))
    assert "\n".join(documents).split("\n") == lines and len(documents) > 2
    assert all(len(document) < LONGEST + 5000 for document in documents)
    assert list(cut(lines[:3])) == []


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A .whl and, where Debian's tools are, a .deb, with their list."""
    folder = tmp_path / "corpus" / "packages"
    folder.mkdir(parents=True)
    lines = [f"{number}: {SAID}" for number in range(400)]
    with zipfile.ZipFile(folder / "a-1-py3-none-any.whl", "w") as wheel:
        for number in range(8):
            found = {"description": "<p>".join(lines[40 * number : 40 * number + 40])}
            wheel.writestr(f"a/{number}.json.gz", gzip.compress(json.dumps(found).encode()))
    files = ["a-1-py3-none-any.whl"]
    if shutil.which("dpkg-deb"):
        root = tmp_path / "root"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN" / "control").write_text("Package: b\nVersion: 1\nArchitecture: all\nMaintainer: b\nDescription: b\n")
        (root / "usr").mkdir()
        (root / "usr" / "b.html").write_text("".join(f"<p>{line}</p>" for line in lines[300:]))
        subprocess.run(
            ["dpkg-deb", "--build", "--root-owner-group", root, folder / "b_1_all.deb"], check=True, capture_output=True
        )
        files.append("b_1_all.deb")
    rows = [{"file": file, "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest()} for file in files]
    with (tmp_path / "list.csv").open("w") as file:
        writer = csv.DictWriter(file, ["file", "sha256"])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(yardstick, "PACKAGES", tmp_path / "list.csv")
    return lines if len(files) == 2 else lines[:320]


def test_the_corpus_has_every_line_of_the_packages_once_and_is_checked(tmp_path, packages, monkeypatch):
    corpus = tmp_path / "corpus"
    with pytest.raises(SystemExit, match=r"has the checksum [0-9a-f]{64} instead of") as refused:
        yardstick.build_corpus(corpus)
    assert not list(corpus.glob("*.xz"))
    monkeypatch.setattr(yardstick, "CHECKSUM", str(refused.value).split()[5])
    monkeypatch.setattr(yardstick, "HELD_OUT", 4)
    yardstick.build_corpus(corpus)
    files = [corpus / f"{name}.jsonl.xz" for name in ("train-00", "train-01", "val")]
    parts = {file: lzma.decompress(file.read_bytes()).splitlines() for file in files}
    assert all(parts.values())
    found = [line for part in parts.values() for document in part for line in json.loads(document)["text"].split("\n")]
    assert sorted(found) == sorted(packages)
    (corpus / "packages" / "a-1-py3-none-any.whl").write_bytes(b"")
    (corpus / "val.jsonl.xz").unlink()
    with pytest.raises(SystemExit, match="has another checksum than in"):
        yardstick.build_corpus(corpus)


def test_every_package_of_the_list_has_a_version_a_licence_and_a_checksum():
    rows = list(csv.DictReader(yardstick.PACKAGES.open()))
    assert len({row["file"] for row in rows}) == len(rows) > 20
    assert all(all(row.values()) and len(row["sha256"]) == 64 and "?" not in row["licence"] for row in rows)


@pytest.mark.parametrize("arm", ARMS)
def test_the_settings_of_every_arm_are_valid(arm):
    recipe, settings = ARMS[arm]
    load_config(recipe, overrides=dict(setting.split("=", 1) for setting in (*settings, "budget.seconds=300")), environment={})


def test_the_table_compares_every_arm_with_nanogpts_settings():
    scores = {"golf/frontier": (1.0, 1.01, 1.02), "frontier": (0.9,), "nanoGPT's settings": (1.3, 1.31, 1.32)}
    shown = table([{"label": label, "score": score} for label, values in scores.items() for score in values]).split("\n")
    assert shown[2].startswith("| golf/frontier | 1.0100 | 0.0100 | 3 | ") and float(shown[2].split("|")[5]) < 1e-4
    assert shown[3] == "| frontier | 0.9000 | - | 1 | - |" and "| nan | - | 0 | - |" in shown[4]


def test_what_the_time_does_not_allow_is_left_for_later(tmp_path, monkeypatch, capsys):
    words = ["--toy", "--seeds", "1", "--limit", "-1", "--results", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", ["yardstick.py", *words])
    yardstick.main()
    assert (told := capsys.readouterr().out).count("not begun") == len(ARMS) and "some runs are left" in told
