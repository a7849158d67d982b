"""Each page of the built site fits a phone and a desk: nothing is wider than the screen.

Needs `zensical`, which builds the site, and a Chromium, which shows it.  A page of our own, on the same
server, opens one page after the other in a frame of each width, and measures.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from docs.test_docs import ROOT

WIDTHS = (390, 1280)
SHOWN = ("index.html", "speed/index.html", "reference/cli/prune/index.html",
         "reference/api/saving/index.html", "reference/failures/index.html")  # fmt: skip
"""Pages of which pictures are taken."""
PROBE = """<!doctype html><pre id="found"></pre><script>
const found = [];
async function look(page) {
  const frame = document.createElement("iframe");
  frame.width = WIDTHS[0];
  frame.height = 900;
  frame.style.border = 0;
  const there = new Promise((done) => (frame.onload = done));
  frame.src = page;
  document.body.append(frame);
  await there;
  for (const width of WIDTHS) {
    frame.width = width;
    await new Promise((done) => setTimeout(done, 50));  // scripts of the theme wrap tables
    const [root, inner] = [frame.contentDocument.documentElement, frame.contentWindow.innerWidth];
    const title = frame.contentDocument.title;
    found.push([page, width, title, root.scrollWidth, root.clientWidth, inner]);
  }
  frame.remove();
}
(async () => {
  for (const page of PAGES) await look(page);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""
DEADLINE_S = 300


@pytest.fixture(scope="module")
def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    there = next(filter(None, map(shutil.which, names)), None)
    if there is None:
        pytest.skip("no Chromium is installed, which would show the pages")
    return there


@pytest.fixture(scope="module")
def built(chromium: str, site: Path) -> Path:
    """The site as `make docs` builds it."""
    root = site.parent / "built"
    text = (ROOT / "mkdocs.yml").read_text()
    for name, folder in (("docs_dir", site.name), ("site_dir", root.name)):
        text = re.sub(rf"^{name}: .*$", f"{name}: {folder}", text, flags=re.MULTILINE)
    settings = site.parent / "mkdocs.yml"
    settings.write_text(text)
    zensical = shutil.which("zensical", path=str(Path(sys.executable).parent))
    assert zensical is not None, "zensical is among the packages of development"
    command = [zensical, "build", "--clean", "--strict", "--config-file", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def browse(chromium: str, profile: Path, *words: str, virtual_s: int) -> str:
    """What a headless Chromium prints after so many seconds of its own time, which idle ones shorten."""
    budget = f"--virtual-time-budget={1000 * virtual_s}"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={profile}", budget, *words]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(3 * DEADLINE_S)
def test_no_page_is_wider_than_its_screen(
    chromium: str, built: Path, address: str, tmp_path: Path
) -> None:
    pages = sorted(p.relative_to(built).as_posix() for p in built.rglob("index.html"))
    assert len(pages) > 90 and set(SHOWN) <= set(pages)
    page = (built / "index.html").read_text()
    stretched = page.replace("</article>", '<div style="width: 3000px">.</div></article>')
    (built / "too-wide.html").write_text(stretched)
    pages.append("too-wide.html")
    probe = PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (built / "probe.html").write_text(probe)
    printed = browse(
        chromium, tmp_path / "profile", "--dump-dom", f"{address}/probe.html", virtual_s=600
    )
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)
    found = json.loads(text.replace("&amp;", "&"))
    assert [(page, width) for page, width, *_ in found] == [(p, w) for p in pages for w in WIDTHS]
    assert {(width, inner) for _, width, _, _, _, inner in found} == {(w, w) for w in WIDTHS}
    assert [title for _, _, title, *_ in found if "holdfast" not in title] == []
    wide = [f"{page} at {w}: {need} of {has}" for page, w, _, need, has, _ in found if need > has]
    assert [text for text in wide if not text.startswith("too-wide.html")] == []
    assert len(wide) == len(WIDTHS), "a page that is too wide is not found"


@pytest.mark.soak
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_can_be_looked_at(chromium: str, address: str, tmp_path: Path, width: int) -> None:
    """Pictures of some pages; where they are is printed (`pytest -s`)."""
    for page in SHOWN:
        picture = tmp_path / f"{page.replace('/', '-')}-{width}.png"
        size, target = f"--window-size={width},2000", f"{address}/{page}"
        browse(chromium, tmp_path / "profile", f"--screenshot={picture}", size, target, virtual_s=2)
        head = picture.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(head[16:20], "big") == width
        print(picture)
