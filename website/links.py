"""Links that work in the repository and on the site both.

Pages are written with links that lead to files of the repository: `[README](../README.md)`, `[memory](memory.md)`,
`[job](../examples/kubernetes/job.yaml)`. On the site a file below docs/ is a page, and so is a notebook. A file
elsewhere becomes a page if it is text, and is copied if it is not, so that the site needs no repository. Names of such
files in running text, `examples/own_task.py` or docs/data.md, become links.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = "README.md"
"""The file of the repository that is the site's first page."""
COPIED = (".png", ".jpg", ".svg", ".json", ".jsonl")
"""Endings of files that are not shown as pages."""

_FENCE = re.compile(r"^(?: {0,3})(```+|~~~+).*?^(?: {0,3})\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(\]\(|\b(?:src|srcset)=")(?![a-z]+:)([^)\s"]+)([)"])""")
"""Of Markdown, and the pictures of HTML; those with a scheme, such as https: or data:, lead elsewhere or are whole."""
_NAMED = re.compile(r"(?<![\w/(\[`.-])(`?)((?:docs|examples)/[\w./-]*\w\.(?:md|py|yaml|sbatch)|(?:README|CONTRIBUTING|"
                    r"CHANGELOG|benchmarks/README)\.md)(`?)(?![\w/`])")


def site_path(repository_path: str) -> str:
    """Where a file of the repository is on the site, as a source file of MkDocs."""
    if repository_path == HOME:
        return "index.md"
    if repository_path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", repository_path.removeprefix("docs/"))
    return f"repository/{repository_path}" + ("" if repository_path.endswith((".md", *COPIED)) else ".md")


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """`change` of every part of the text that is not a fenced block."""
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at:fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])


def named_as_links(markdown: str, repository_path: str) -> str:
    """Names of files of the repository in running text, as links."""
    folder = posixpath.dirname(repository_path)

    def link(named: re.Match[str]) -> str:
        if len(named[1]) != len(named[3]) or not (ROOT / named[2]).is_file() or named[2] == repository_path:
            return named[0]
        return f"[`{named[2]}`]({posixpath.relpath(named[2], folder or '.')})"

    def lines(text: str) -> str:
        """Indented code and headings stay as they are."""
        return "\n".join(line if line.startswith(("    ", "#")) and not line.lstrip().startswith(("-", "|")) else
                         _NAMED.sub(link, line) for line in text.split("\n"))

    return _outside_fences(markdown, lines)


def _targets(markdown: str, repository_path: str) -> Iterator[str]:
    folder, found = posixpath.dirname(repository_path), []
    _outside_fences(markdown, lambda text: found.extend(_LINK.findall(text)) or text)
    for _, target, _ in found:
        path = target.partition("#")[0]
        if path:
            yield posixpath.normpath(posixpath.join(folder, path))


def files_outside(markdown: str, repository_path: str) -> set[str]:
    """Files outside of docs/ that the page leads to, and that the site must have."""
    found = _targets(named_as_links(markdown, repository_path), repository_path)
    return {path for path in found if not path.startswith("docs/") and (ROOT / path).is_file()}


def for_site(markdown: str, repository_path: str) -> str:
    """The page with links to where the site has what they lead to. A folder has no page, and its link becomes text."""
    folder, here = posixpath.dirname(repository_path), posixpath.dirname(site_path(repository_path))

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target:
            return found[0]
        path = site_path(posixpath.normpath(posixpath.join(folder, target)))
        return f"{found[1]}{posixpath.relpath(path, here or '.')}{'#' + anchor if anchor else ''}{found[3]}"

    return _outside_fences(named_as_links(markdown, repository_path), lambda text: _LINK.sub(link, text))


def as_page(repository_path: str) -> str:
    """A text file of the repository as a page that shows it."""
    text = (ROOT / repository_path).read_text()
    if repository_path.endswith(".md"):
        return text
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash"}.get(Path(repository_path).suffix,
                                                                                         "text")
    return f"# {repository_path}\n\n````{language}\n{text.rstrip()}\n````\n"
