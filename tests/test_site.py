"""The site: it builds without warnings, has no dead links, needs no network, and agrees with the code."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ranvier
from ranvier.config import effects, read
from tests.sources import nodes
from tests.train.browser import Browser
from website import links, notebooks, reference, schedule_picture

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMING_FROM = sorted((DOCS / "coming-from").glob("*.md"))
STEPS = [*sorted((DOCS / "tutorials").glob("*.md")), *COMING_FROM, *sorted((DOCS / "concepts").glob("*.md"))]
"""Pages whose programs and commands depend on one another, and run in one folder."""


# ---------------------------------------------------------------------- what the pages say

def test_links_outside_of_docs_become_pages_of_the_site() -> None:
    text = ("[job](../examples/kubernetes/job.yaml), `examples/own_task.py`, docs/data.md, [x](memory.md#a)\n\n"
            "```\n`docs/data.md`\n```\n")
    made = links.for_site(text, "docs/kubernetes.md")
    assert made == ("[job](repository/examples/kubernetes/job.yaml.md), [`examples/own_task.py`](repository/examples/"
                    "own_task.py.md), [`docs/data.md`](data.md), [x](memory.md#a)\n\n```\n`docs/data.md`\n```\n")
    assert links.for_site("[m](docs/memory.md)", "README.md") == "[m](memory.md)"
    deeper = links.for_site("[m](../memory.md) [r](../../README.md)", "docs/tutorials/x.md")
    assert deeper == "[m](../memory.md) [r](../index.md)"
    assert links.files_outside(text, "docs/kubernetes.md") == {"examples/kubernetes/job.yaml", "examples/own_task.py"}
    assert links.for_site("[n](tutorials/notebook.ipynb)", "docs/own-model.md") == "[n](tutorials/notebook.md)"
    assert links.for_site('<source srcset="docs/images/a.svg"><img src="docs/images/b.svg">', "README.md") == (
        '<source srcset="images/a.svg"><img src="images/b.svg">')
    for elsewhere in ('<img src="data:image/png;base64,ab//cd/../e+f==">',
                      "[x](https://example.org/a//b)", "[x](mailto:a@b)"):
        assert links.for_site(elsewhere, "docs/x.md") == elsewhere and not links.files_outside(elsewhere, "docs/x.md")


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    page = notebooks.as_page(DOCS / "tutorials" / "notebook.ipynb")
    assert page.startswith("# Your model on four ranks") and '<a href="notebook.ipynb" download>' in page
    assert "\n\n````python\nclass Classifier(nn.Module):\n" in page
    assert re.search(r'\n````text title="Output"\n(.+\n)*step 60: loss 0\.\d+\n', page)
    assert '\n\n<figure><img alt="" src="data:image/png;base64,iVBOR' in page


def test_notebooks_keep_no_warnings() -> None:
    """Warnings would contain paths of the machine."""
    for path in (DOCS / "tutorials").glob("*.ipynb"):
        assert '"name": "stderr"' not in path.read_text(), path.name


def test_every_setting_and_every_reason_is_in_the_reference() -> None:
    page = reference.settings_page()
    assert all(f"\n#### {setting.flag} {{#" in page for setting in read.settings().values())
    assert set(reference.reasons()) == {*effects.CONDITIONS, *effects.ASKED}, "add a run to website.reference.probes"
    assert "No effect where the task lm, chat" in page
    assert "``" not in page, "an empty default must not be empty code"


def test_reasons_that_differ_in_a_word_are_one() -> None:
    assert reference.joined(["a 1 c", "b", "a 2 c", "a 3 c", "a 3 d"]) == ["a 1, 2 or 3 c", "b", "a 3 d"]


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_coming_from_names_settings_that_exist(page: Path) -> None:
    rows = [row for row in reference.rows(page.read_text()) if len(row) == 3]
    assert len(rows) >= 10
    for theirs, ours, _ in rows:
        named = re.findall(r"--(?:no-)?([a-z][\w.-]*)", ours)
        assert len(named) == len(reference.flags_in(ours)), f"{theirs}: {ours}"
        for setting, value in re.findall(r"--([a-z][\w.-]*) ([\w-]+)`", ours):
            if value not in ("n", "m", "p", "t"):
                merged = read.merge([read.Layer(origin="page", values={setting.replace("-", "_"): value},
                                                is_text=True)])
                assert not merged.problems, merged.problems


def test_other_names_are_in_the_reference() -> None:
    names = reference.other_names()
    assert ("Megatron-LM", "--micro-batch-size") in names["batch.microbatch_size"]
    assert ("DeepSpeed", "train_batch_size") in names["batch.global_size"]
    assert len({system for found in names.values() for system, _ in found}) == len(COMING_FROM)


def test_an_error_names_the_setting_that_a_page_has_for_a_flag_of_another_system() -> None:
    for page in COMING_FROM:
        for theirs, ours, *_ in reference.rows(page.read_text()):
            settings = reference.flags_in(ours)
            for name in re.findall(r"`--([\w-]+)", theirs) if settings else ():
                own = name.replace("-", "_")
                found = read.name_elsewhere(own) or next((one for one in settings if one.rpartition(".")[2] == own), "")
                assert found in settings, f"{page.name}: --{name} is {settings} there, and an error says {found!r}"


@cache
def texts_of_the_code() -> list[str]:
    """Every text of the package, with a mark for each value in it; the strings of one expression are one text."""
    found = []
    for inside in nodes().values():
        found += [_text(node) for node in inside if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp))]
    return list({text for text in found if len(text) > 5})


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call) and (
            ast.unparse(node.value.func) == "counted"):
        return f"\0 {_text(node.value.args[1])}s"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "\0"


def is_in_the_code(message: str) -> bool:
    """Whether the parts between the marks are in a single text of the code, in this order."""
    parts = [part.strip(" ") for part in message.split("…")]

    def has(text: str) -> bool:
        at = 0
        for part in parts:
            at = text.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True

    return any(map(has, texts_of_the_code()))


def messages() -> list[str]:
    rows = [row for row in reference.rows((DOCS / "troubleshooting.md").read_text()) if len(row) == 3]
    return [(double or single).strip() for first, _, _ in rows
            for double, single in re.findall(r"``\s?(.+?)\s?``(?!`)|`([^`]+)`", first)]


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    found = messages()
    assert len(found) >= 40
    assert not [message for message in found if not is_in_the_code(message)]
    assert not is_in_the_code("is no message of … this code")


def test_the_picture_of_the_schedule_is_what_the_simulator_gives() -> None:
    made = schedule_picture.results()
    assert made["message-driven"].seconds < made["1f1b"].seconds
    for form in schedule_picture.FORMS:
        text = schedule_picture.picture(form)
        assert (DOCS / "images" / form.name).read_text() == text, "python -m website.schedule_picture docs/images"
        assert "prefers-color-scheme:dark" in text and "@keyframes run" in text


@pytest.mark.parametrize("colours", [schedule_picture.LIGHT, schedule_picture.DARK], ids=["light", "dark"])
def test_the_picture_of_the_schedule_can_be_read(colours) -> None:
    """By WCAG's contrast of texts on their backgrounds."""
    def light(name: str) -> float:
        text = colours[name].removeprefix("#")
        parts = [int(part, 16) / 255 for part in re.findall("..", text if len(text) == 6 else "".join(
            2 * digit for digit in text))]
        red, green, blue = (part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.05 + 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ground, ink in (("page", "ink"), ("page", "faint"), ("F", "on-F"), ("B", "on-B"), ("W", "on-W")):
        darker, lighter = sorted((light(ground), light(ink)))
        assert lighter / darker >= 4.5, (ground, ink)


def test_every_public_name_is_in_the_python_reference() -> None:
    page = reference.python()
    assert all(re.search(rf"^::: ranvier\S*\.{name}$", page, flags=re.MULTILINE) for name in ranvier.__all__)


def test_lists_begin_after_an_empty_line() -> None:
    """Otherwise Python-Markdown takes them for text, unlike GitHub."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
            begins = re.match(r"(- |1\. )\S", line)
            assert not (begins and before.strip() and not re.match(r"(- |\d+\. |  )", before)), f"{page.name}: {line}"


# ---------------------------------------------------------------------- the built site

class Tags(HTMLParser):
    """The links and anchors of a page, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "source", "iframe"):
            self.loaded += [values[name] for name in ("src", "srcset") if name in values]
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next") and "href" in values:
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                          env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_no_link_of_the_site_is_dead(site: Path) -> None:
    pages = {path: Tags(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 50
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            has_anchor = target not in pages or not parts.fragment or unquote(parts.fragment) in pages[target].anchors
            if not (target.is_file() and has_anchor):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)


@pytest.mark.slow
def test_the_search_finds_how_to_pages_first(site: Path) -> None:
    """The search weighs pages by how often they contain a word, and the log of experiments contains every word."""
    text = (site / "search" / "search_index.js").read_text()
    entries = json.loads(text[text.index("{"):text.rindex("}") + 1])["docs"]
    boosts = {entry["location"]: entry.get("boost", 1) for entry in entries}
    assert boosts["own-model.html"] > boosts["lora.html"] > boosts["tutorials/own-model.html"] > 1
    logs = ("experiments/2026-11.html", "repository/CHANGELOG.html", "architecture.html")
    assert {boosts[page] for page in logs} == {0.5}


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not [link for link in Tags(path.read_text()).loaded if urlsplit(link).netloc], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)\"']+", path.read_text()), path
    assert (site / "search" / "search_index.js").exists(), "the search works without a server"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed: nobody looks at the site")
def test_a_phone_shows_every_page(site: Path, tmp_path: Path) -> None:
    """In full width, with its pictures and without errors. 404.html is for servers: its links begin at their root."""
    pictures = "[...document.images].filter(one => !one.naturalWidth).map(one => one.src.slice(0, 80))"
    with Browser(tmp_path / "profile") as browser:
        for path in set(site.rglob("*.html")) - {site / "404.html"}:
            browser.open(path.as_uri(), width=390, is_phone=True)
            assert browser.value("document.documentElement.scrollWidth") <= 390, path
            assert not browser.value(pictures) and not browser.errors(), path


@pytest.mark.slow
def test_the_site_has_what_is_made_from_the_package(site: Path) -> None:
    settings = (site / "reference" / "settings.html").read_text()
    assert 'id="batch-global-size"' in settings and "train_batch_size" in settings
    assert "deferred" in (site / "glossary.html").read_text() or "microbatch" in (site / "glossary.html").read_text()
    assert "ranvier.Engine" in (site / "reference" / "python.html").read_text()
    assert "--explain" in (site / "reference" / "commands.html").read_text()
    step_time = (site / "tutorials" / "step-time.html").read_text()
    assert "largest difference" in step_time and '<figure><img alt="" src="data:image/png' in step_time


# ---------------------------------------------------------------------- the pages' programs and commands

def steps(page: Path) -> list[tuple[str, str, str]]:
    """(language, file name, text) of each block that is a file or has commands."""
    found = re.findall(r"^```(bash|python|toml|json)(?: title=\"([\w.]+)\")?\n(.*?)^```", page.read_text(),
                       flags=re.MULTILINE | re.DOTALL)
    return [(language, name, text) for language, name, text in found if name or language == "bash"]


def run_steps(page: Path, folder: Path, shorter: dict[str, str]) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    output = ""
    for language, name, text in steps(page):
        if language != "bash":
            (folder / name).write_text(text)
            continue
        for command in filter(None, map(str.strip, text.splitlines())):
            done = subprocess.run(shorter.get(command, command), shell=True, cwd=folder, env=environment,
                                  capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            output += done.stdout
    return output


@pytest.mark.slow
def test_the_first_tutorial(tmp_path: Path) -> None:
    """The tutorial's loop, unchanged except for fewer steps."""
    output = run_steps(DOCS / "tutorials" / "own-model.md", tmp_path,
                       {"python train.py 100": "python train.py 5", "python train.py 200": "true"})
    assert re.search(r"^step 5: held out 0\.\d+$", output, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", STEPS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_steps_of_a_page(page: Path, tmp_path: Path) -> None:
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    output = run_steps(page, tmp_path, {})
    if page.stem == "own-model":
        first, second = [float(found) for found in re.findall(r"held out (\S+)", output)]
        assert second < first
        assert "step 200:" in output, "the second command continues the first"
    if page.stem in ("fsdp", "ddp"):
        assert float(re.findall(r"^loss (\S+)$", output, flags=re.MULTILINE)[-1]) < 0.2
    if page.stem == "fine-tune":
        assert "Hello Ada" in output
