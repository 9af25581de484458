"""Draws the page of `ingot export --format web` as a visitor sees it: exports a run, opens it in Chromium and lets it write.

    python tools/picture_web_page.py RUN [--phone] -o FILE.png

Needs Chromium and PyPI's playwright. The text is sampled, so it differs each time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

SHOW = "import sys; from pathlib import Path; from ingot.ui.model_page import serve_page; serve_page(Path(sys.argv[1]))"


def draw(run: str, output: str, phone: bool) -> None:
    size = {"width": 390, "height": 760} if phone else {"width": 900, "height": 560}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page_folder = f"{folder}/page"
        subprocess.run([sys.executable, "-m", "ingot", "export", run, "--format", "web", "-o", page_folder], check=True)
        environment = {**os.environ, "BROWSER": "true"}  # no window
        server = subprocess.Popen([sys.executable, "-c", SHOW, page_folder], stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split(";")[0]
            browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport=size)
            page.goto(address)
            page.locator("#write:enabled").wait_for(timeout=180_000)
            page.fill("#prompt", "ROMEO:\nBut soft, what light")
            page.fill("#top-k", "40")
            page.locator("#write").click()
            page.locator("#result[data-state=written]").wait_for(timeout=180_000)
            Path(output).parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=output)
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("run")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("-o", dest="output", required=True)
    given = parser.parse_args()
    draw(given.run, given.output, given.phone)
