"""Compare recipes on a corpus that anyone can build: 312 MB of documentation from packages of Debian 12 and PyPI.

    python benchmarks/yardstick.py --corpus yardstick --seeds 1 2 3 --limit 580

The first call downloads the packages of yardstick.csv (with licences and checksums) and builds the corpus; this needs apt-get
of Debian 12, pip, and five minutes on one core. A package version that has left Debian's servers can be downloaded from
snapshot.debian.org into CORPUS/packages. The corpus contains the paragraphs of English text in all documents; of equal
paragraphs, only the first. It can be copied to a machine with a GPU, where every arm trains for 300 s per seed. Completed runs
append a line of JSON to --results; repeat the command until it reports that nothing is left. --toy trains tiny models on the
bundled text.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import html
import json
import lzma
import re
import statistics
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from recipe_runs import Case, add_options, finished, learn_tokenizer, prepare, run_all, say

from ingot.experiments.statistics import welch

PACKAGES = Path(__file__).with_suffix(".csv")
CHECKSUM = "38227793f2f66f8cd6d1ccd1591c11f5c0903ad63eae215a98a94ed5625ae86f"  # SHA-256 of the corpus
HELD_OUT = 32  # one of this many documents is held out
LONGEST = 60_000  # characters per document; longer ones are cut at the end of a line
PIECES = 8192
WORTH_STARTING = 240.0  # a run is started only if this many seconds are left, because it compiles before it trains
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "golf/frontier": ("golf/frontier", ("artifact.tokenizer=true",)),
    "frontier": ("frontier", ()),
    "autoresearch's settings": (
        "frontier",
        (
            "data.seq_len=2048", "data.sampling=shuffle", "training.stages=[]", "training.tokens_per_step=262144",
            "model.pattern=L", "model.key_offset=false", "model.rope_part=1.0", "optimizer.ema_decay=null",
        ),
    ),
    "nanoGPT's settings": (
        "gpt2",
        (
            "training.max_steps=null", "optimizer.schedule=budget", "optimizer.decay_fraction=1.0", "optimizer.warmup_steps=100",
            "optimizer.decay_steps=null", "evaluation.every=0", "evaluation.final_rows=null", "evaluation.sample_tokens=0",
        ),
    ),
}  # fmt: skip
TOY = (
    "data.path=sample:shakespeare", "data.tokenizer=byte", "data.seq_len=64", "model.layers=2", "model.heads=20",
    "model.width=160", "training.tokens_per_step=256", "evaluation.final_rows=8", "training.stages=[]", "model.vocab_size=null",
    "artifact.tokenizer=false",
)  # fmt: skip

GONE = re.compile(r"<(script|style|head|nav|header|footer|pre)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
BREAK = re.compile(r"</?(?:p|div|li|tr|h\d|br|td|th|dt|dd|table|section|ul|ol|dl|article|note)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
ROFF = re.compile(r"\\f.|\\[&|^]|\\s[-+]?\d")
ENGLISH = re.compile(r"\b(?:the|of|and|to|is|in|a)\b")


def build_corpus(corpus: Path) -> None:
    """Write train-00, train-01 and val as .jsonl.xz unless they exist; raise an error if the text is not the expected one."""
    if (corpus / "val.jsonl.xz").exists():
        return
    began, seen, documents = time.perf_counter(), set[bytes](), dict[bytes, str]()
    for path in download(corpus / "packages"):
        size = sum(map(len, documents.values()))
        for name, data in texts(path):
            for document in cut(prose(text_of(name, data), seen)):
                documents[hashlib.sha256(document.encode()).digest()] = document
        say(f"{(sum(map(len, documents.values())) - size) / 1e6:8.2f} MB from {path.name}")
    shuffled = [documents[digest] for digest in sorted(documents)]
    checksum = hashlib.sha256("\0".join(shuffled).encode()).hexdigest()
    if checksum != CHECKSUM:
        sys.exit(f"the text has the checksum {checksum} instead of {CHECKSUM}")
    held_out = len(shuffled) // HELD_OUT
    half = (held_out + len(shuffled)) // 2
    parts = {"train-00": shuffled[held_out:half], "train-01": shuffled[half:], "val": shuffled[:held_out]}
    for name, part in parts.items():
        partial = corpus / f"{name}.partial"
        with lzma.open(partial, "wt", preset=2) as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in part)
        partial.rename(corpus / f"{name}.jsonl.xz")
    sizes = [f"{name} {len(part):,} documents, {sum(len(d.encode()) for d in part):,} bytes" for name, part in parts.items()]
    say(f"{corpus} built in {time.perf_counter() - began:.0f} s: {'; '.join(sizes)}")


def download(folder: Path) -> list[Path]:
    """Return the files of yardstick.csv in its order, downloaded if missing, with their checksums verified."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(PACKAGES.open()))
    for row in rows:
        if not (folder / row["file"]).exists():
            name = f"{row['package']}=={row['version']}" if row["source"] == "PyPI" else f"{row['package']}={row['version']}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", name]
            subprocess.run(pip if row["source"] == "PyPI" else ["apt-get", "download", "--quiet", name], cwd=folder, check=True)
        if hashlib.sha256((folder / row["file"]).read_bytes()).hexdigest() != row["sha256"]:
            sys.exit(f"{folder / row['file']} has another checksum than in {PACKAGES}; delete it")
    return [folder / row["file"] for row in rows]


def texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the documents in a .deb or .whl file."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = sorted(name for name in wheel.namelist() if name.removesuffix(".gz").endswith((".json", ".py")))
            yield from (unpacked(name, wheel.read(name)) for name in names)
        return
    suffixes = (".html", ".htm", ".xhtml", ".page", ".txt", ".rst", ".dict.dz")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        stream: IO[bytes] | None = process.stdout
        with tarfile.open(fileobj=stream, mode="r|") as package:
            for member in package:
                name = member.name.removesuffix(".gz")
                if member.isfile() and (name.endswith(suffixes) or re.search(r"/man\d/", name)):
                    file: Any = package.extractfile(member)
                    yield unpacked(member.name, file.read())


def unpacked(name: str, data: bytes) -> tuple[str, bytes]:
    return name.removesuffix(".gz"), gzip.decompress(data) if name.endswith((".gz", ".dz")) else data


def text_of(name: str, data: bytes) -> str:
    """Return the text of a web or manual page, of an API's description in JSON or Python, or of a plain text, by paragraphs."""
    text = data.decode("utf-8", "replace")
    if name.endswith(".py"):
        text = "\n\n".join(DOCSTRING.findall(text))
    if name.endswith(".json"):
        return "\n".join(map(without_tags, descriptions(json.loads(text))))
    if name.endswith((".html", ".htm", ".xhtml", ".page")):
        return without_tags(text)
    if re.search(r"/man\d/", name):
        text = re.sub(r"^[.'].*$", "\n", text, flags=re.MULTILINE)
        text = ROFF.sub("", text).replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
    return re.sub(r"(?<!\n)\n(?!\s*[\n:*-])", " ", text)


def without_tags(text: str) -> str:
    return html.unescape(TAG.sub("", BREAK.sub("\n", GONE.sub("\n", text).replace("\n", " "))))


def descriptions(value: Any) -> Iterator[str]:
    """Yield the texts named `documentation` or `description` in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        if key in ("documentation", "description") and isinstance(item, str):
            yield item
        else:
            yield from descriptions(item)


def prose(text: str, seen: set[bytes]) -> list[str]:
    """Return the lines of a text that are long enough to be prose and not in `seen`, and add them to it."""
    lines = []
    for line in (" ".join(line.split()) for line in text.split("\n")):
        words = line.count(" ")
        key = hashlib.blake2b(line.encode(), digest_size=8).digest()
        if len(line) >= 60 and words >= 8 and 30 * len(ENGLISH.findall(line)) > words and key not in seen:
            seen.add(key)
            lines.append(line)
    return lines


def cut(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines as documents of at most about LONGEST characters, without those of less than 400."""
    document: list[str] = []
    for line in (*lines, None):
        if line is None or sum(map(len, document)) > LONGEST:
            if len(whole := "\n".join(document)) >= 400:
                yield whole
            document = []
        if line is not None:
            document.append(line)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Format the mean score of each arm, and the p-value of its difference from nanoGPT's."""
    scores = {label: [r["score"] for r in results if r["label"] == label] for label in ARMS}
    lines = ["| arm | val_bpb, mean | std | n | p against nanoGPT's settings |", "|---|---|---|---|---|"]
    for label, values in scores.items():
        other = scores["nanoGPT's settings"]
        tested = min(len(values), len(other)) > 1 and values is not other
        p = f"{welch(values, other).p:.2g}" if tested else "-"
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        lines.append(f"| {label} | {statistics.fmean(values) if values else float('nan'):.4f} | {spread} | {len(values)} | {p} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "yardstick", 300.0)
    parser.add_argument("--only-corpus", action="store_true", help="build the corpus and train nothing")
    arguments = parser.parse_args()
    began = time.perf_counter()
    shared = TOY
    if not arguments.toy:
        if arguments.corpus is None:
            parser.error("pass --corpus DIR or --toy")
        build_corpus(arguments.corpus)
        if arguments.only_corpus:
            return
        tokenizer = arguments.data.with_suffix(".model")
        if not tokenizer.exists():
            learn_tokenizer(arguments.corpus, PIECES, tokenizer)
        prepare(arguments.corpus, str(tokenizer), arguments.data)
        shared = (f"model.vocab_size={PIECES}",)
    cases = [
        Case(label.split("'")[0].replace("/", "-"), recipe, seed, arguments.seconds, (*settings, *shared, *arguments.set))
        for seed in arguments.seeds
        for label, (recipe, settings) in ARMS.items()
    ]
    labels = dict(zip((case.label for case in cases), ARMS, strict=False))

    def summary(case: Case, record: dict[str, Any]) -> dict[str, Any]:
        return {"label": labels[case.label], "score": record["artifact_bpb"] or record["val_bpb"]}

    whole = run_all(cases, arguments, summary, (), WORTH_STARTING, began)
    names = {case.name for case in cases}
    say(table([r for r in finished(arguments.results) if r["name"] in names]))
    say("\nnothing is left" if whole else "\nsome runs are left: repeat the command")


if __name__ == "__main__":
    main()
