"""The page of `ingot export --format web`: its tokenizer, its files, and the same text in a browser as from `ingot generate`."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from programs import Ingot, train_words
from typer.testing import CliRunner

from ingot.artifact.hf_tokenizer import tokenizer_files
from ingot.cli.main import app
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, Tokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import CharTokenizer, NumberTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import ConfigError
from ingot.ui.model_page import HERE, check_tokenizer, write_page

PATIENCE = 300_000  # milliseconds
TRICKY = [
    "", "hello world", "  two  spaces  ", "\n\n a\n \n", "\t\tx", "it's we'll they've I'M 'd 's's", "naïve café ÜBER", "end   ",
    "日本語のテキスト", "👩‍👩‍👧‍👦 🇨🇭 emoji", "\ufeffbom", "x" * 300, "١٢٣ ½ Ⅷ 123abc", "e\u0301 \u0301", "\U0001d400\U0010ffff",
    "a\u00a0b\u0085c\ufeffd\u200be\u1680f\u180eg\u2028h", "\x00\x01\x7f\xad\x1c\x1d a", "\r\n\r\n", "a \u3000 b",
    "<s> <pad> <|endoftext|>",
]  # fmt: skip


def texts() -> list[str]:
    draw = random.Random(0)
    pool = "ab c'stdé\n \t\u0085\u00a0日👍\u0301\u200d1²Ⅷ_-.\ufeff\r\x1c"
    return [*TRICKY, *("".join(draw.choices(pool, k=draw.randrange(40))) for _ in range(200))]


def tokenizers() -> dict[str, Callable[[], Tokenizer]]:
    return {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer("".join(texts())),
        "bpe": lambda: from_json(learn("bpe", texts() * 3, 400)),
        "gpt2": GPT2Tokenizer,
    }


def exported_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """A folder with the tokenizer as the page finds it."""
    files, _ = tokenizer_files(tokenizer.spec(), 64)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_page(folder)
    return folder


ENCODE = """
import fs from "node:fs";
const { Tokenizer } = await import(process.argv[1] + "/tokenizer.js");
const read = (name) => fs.readFileSync(process.argv[1] + "/" + name, "utf8");
const gpt2 = () => ({
  model: { vocab: JSON.parse(read("vocab.json")), merges: read("merges.txt").trim().split("\\n").slice(1) },
  pre_tokenizer: {}, added_tokens: [{ id: 50256 }],
});
const tokenizer = new Tokenizer(fs.existsSync(process.argv[1] + "/vocab.json") ? gpt2() : JSON.parse(read("tokenizer.json")));
const texts = JSON.parse(read("texts.json"));
console.log(JSON.stringify(texts.map((text) => {
  try {
    const [ids, decoder] = [tokenizer.encode(text), new TextDecoder("utf-8", { ignoreBOM: true })];
    return [ids, ids.map((id) => decoder.decode(tokenizer.bytes[id], { stream: true })).join("") + decoder.decode()];
  } catch (error) {
    return error.message;
  }
})));
"""


def in_javascript(folder: Path, given: list[str]) -> list[Any]:
    """Ids and the decoded text of each text, or the error's message, by the page's own code."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    (folder / "texts.json").write_text(json.dumps(given))
    (folder / "package.json").write_text('{"type": "module"}')
    words = ["node", "--input-type=module", "-e", ENCODE, str(folder)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.parametrize("name", tokenizers())
def test_the_page_encodes_and_decodes_every_text_as_python_does(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizers()[name]()
    check_tokenizer(tokenizer.spec())
    results = in_javascript(exported_tokenizer(tokenizer, tmp_path), texts())
    for text, result in zip(texts(), results, strict=True):
        assert result == [tokenizer.encode(text).tolist(), text]


def test_a_character_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    (error,) = in_javascript(exported_tokenizer(CharTokenizer("abc"), tmp_path), ["abxc"])
    assert error == '"x" is not in the model\'s vocabulary; remove it from the prompt'


def test_a_tokenizer_that_the_page_does_not_have_is_refused() -> None:
    normalised = json.loads(learn("bpe", texts(), 300))
    normalised["normalizer"] = {"type": "NFC"}
    sentencepiece = SentencePieceTokenizer(learn("sentencepiece", ["some words and more words"] * 50, 300))
    for tokenizer in (sentencepiece, NumberTokenizer(10), from_json(json.dumps(normalised).encode())):
        with pytest.raises(ConfigError, match=r"--format web does not support this model's tokenizer .*it supports byte, char"):
            check_tokenizer(tokenizer.spec())
    with pytest.raises(ConfigError, match="leave out --no-tokenizer"):
        check_tokenizer(None)


def test_the_page_names_files_that_are_there_and_no_other_site(tmp_path: Path) -> None:
    exported_tokenizer(ByteTokenizer(), tmp_path)
    ours = [path for path in tmp_path.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")]
    named = set()
    for path in ours:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|['\"(]//|innerHTML|\beval\(", text), path.name
        named |= set(re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"|"([\w/.-]+\.(?:js|onnx|json|gz))"', text))
    names = {name for found in named for name in found if name}
    assert {"page.js", "worker.js", "tokenizer.js", "style.css", "model.onnx", "config.json", "tokenizer.json"} <= names
    assert all((tmp_path / name).is_file() for name in names - {"model.onnx", "config.json", "vocab.json"}), names
    assert (tmp_path / "onnxruntime/LICENSE").read_text().startswith("MIT License")
    assert not list(tmp_path.rglob("*.py")) and sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 4 << 20


@pytest.fixture(scope="module")
def exported(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference run as a page, in fp32, whose greedy text is the model's."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra onnx is not installed")
    folder = tmp_path_factory.mktemp("web") / "page"
    words = ["export", str(reference), "--format", "web", "--dtype", "fp32", "-o", str(folder)]
    result = CliRunner().invoke(app, words)
    assert result.exception is None, result.exception
    return folder


@pytest.fixture
def served() -> Iterator[Callable[[Path], str]]:
    """A function that serves a folder as any plain file server does."""
    servers = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    def call(folder: Path) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield call
    for server in servers:
        server.shutdown()
        server.server_close()


def opened(browser: Any, address: str) -> Any:
    """The page once its model is loaded; it fails if anything else is asked for."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(address) else route.abort())
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("requestfailed", lambda request: page.wrong.append(request.url))
    page.on("console", lambda told: page.wrong.append(told.text) if told.type == "error" else None)
    page.goto(address)
    page.locator("#write:enabled, #status.error").wait_for(timeout=PATIENCE)
    assert page.locator("#status").inner_text() == "ready"
    return page


def write(page: Any, prompt: str, **settings: object) -> str:
    for name, value in {"prompt": prompt, "temperature": 0, **settings}.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.locator("#write").click()
    page.locator("#result[data-state=written]").wait_for(timeout=PATIENCE)
    assert page.wrong == []
    return str(page.locator("#text").text_content())


def generated(run: Path, prompt: str, tokens: int) -> str:
    words = ["generate", str(run), "--prompt", prompt, "--temperature", "0", "--tokens", str(tokens), "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exception is None, result.exception
    return str(json.loads(result.stdout)["texts"][0]).removeprefix(prompt)


@pytest.mark.long
@pytest.mark.parametrize("prompt", ["the", "", "longer than the context: " * 3])
def test_the_page_writes_what_generate_writes_past_the_context_with_the_network_off(
    exported: Path, reference: Path, browser: Any, served: Callable[[Path], str], prompt: str
) -> None:
    page = opened(browser, served(exported))
    page.context.set_offline(True)
    assert write(page, prompt, tokens=50) == generated(reference, prompt, 50)
    assert page.locator("#prompted").text_content() == prompt
    assert re.fullmatch(r"50 tokens, [\d.]+ tokens per second", page.locator("#status").inner_text())
    page.close()


@pytest.mark.long
def test_the_same_greedy_text_comes_from_top_1_and_a_text_can_be_stopped(
    exported: Path, browser: Any, served: Callable[[Path], str]
) -> None:
    page = opened(browser, served(exported))
    assert write(page, "a", tokens=30) == write(page, "a", tokens=30, temperature=5, top_k=1)
    page.fill("#tokens", "100000")
    page.locator("#write").click()
    page.get_by_text(re.compile(r"^\d+ tokens,")).wait_for(timeout=PATIENCE)
    page.locator("#write", has_text="Stop").click()
    page.locator("#result[data-state=written]").wait_for(timeout=PATIENCE)
    assert page.wrong == []
    assert write(page, "b", tokens=5)  # it writes again after a stop
    page.close()


@pytest.mark.long
def test_a_model_with_gpt2_tokenizer_writes_on_a_page_without_horizontal_scrolling(
    ingot: Ingot, data: Path, tmp_path: Path, browser: Any, served: Callable[[Path], str]
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra onnx is not installed")
    ingot(*train_words(data, tmp_path / "run", training__max_steps=2, data__path="sample:shakespeare+gpt2", model__width=16))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--format", "web", "-o", str(tmp_path / "page")])
    assert result.exception is None, result.exception
    page = opened(browser, served(tmp_path / "page"))
    assert write(page, "To be, or not", tokens=8, temperature=1)
    assert page.locator("body").bounding_box()["width"] <= 390
    page.close()


def test_open_serves_the_folder_until_interrupted(tmp_path: Path, python: Callable[..., Any]) -> None:
    program = python(
        "import sys, webbrowser; webbrowser.open = lambda url: print('opened', url, flush=True)\n"
        "from pathlib import Path; from ingot.ui.model_page import serve_page; serve_page(Path(sys.argv[1]))",
        exported_tokenizer(ByteTokenizer(), tmp_path),
    )
    address = re.search(r"http://127\.0\.0\.1:\d+/", program.stdout.readline())[0]
    assert program.stdout.readline() == f"opened {address}\n"
    for name, kind in {
        "": "text/html",
        "worker.js": "text/javascript",
        "onnxruntime/ort.wasm.bundle.min.mjs": "text/javascript",
    }.items():
        with urllib.request.urlopen(address + name) as answer:
            assert answer.headers.get_content_type() == kind
    program.send_signal(2)
    assert program.wait(300) == 0 and program.stdout.read() == "ended\n"
