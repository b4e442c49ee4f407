"""The hooks of MkDocs: pages from the repository and the package, beside those of docs/."""

from __future__ import annotations

import re
import sys
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

from website import links, notebooks, reference

PARTS = {"settings": reference.settings_page, "terms": reference.terms, "commands": reference.commands,
         "python": reference.python, "step": reference.step}
"""What a line `<!-- NAME -->` of a page stands for on the site."""
BOOSTS = {"How-to": 3.0, "Tutorials": 1.5, "Coming from": 1.5, "Reference": 0.5}
"""How much more a page of these parts of the navigation counts in the search."""
PAGE_BOOSTS = {"own-model.md": 12.0, "checkpoints.md": 9.0, "reference/python.md": 0.01, "reference/settings.md": 0.02}
"""Of pages whose words are on all others, too, and of those that have all words."""
LOGS = ("experiments", "repository/", "architecture.md", "papers.md")
"""Pages that begin so count half: they mention everything, and are what nobody looks for first."""


def _repository_path(page_uri: str) -> str:
    if page_uri == "index.md":
        return links.HOME
    return page_uri.removeprefix("repository/") if page_uri.startswith("repository/") else f"docs/{page_uri}"


def on_files(files: Any, config: Any) -> Any:
    """Adds README as the first page, a page for each notebook, and every file outside of docs/ that a page leads to."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.append(File.generated(config, links.site_path(f"docs/{file.src_uri}"),
                                    content=notebooks.as_page(links.ROOT / "docs" / file.src_uri)))
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    waiting, added = [links.HOME], set()
    for path, text in texts.items():
        waiting += links.files_outside(text, path)
    while waiting:
        path = waiting.pop()
        if path in added:
            continue
        added.add(path)
        if path.endswith(links.COPIED):
            files.append(File.generated(config, links.site_path(path), abs_src_path=str(links.ROOT / path)))
            continue
        text = links.as_page(path)
        files.append(File.generated(config, links.site_path(path), content=text,
                                    inclusion=InclusionLevel.NOT_IN_NAV))
        if path.endswith(".md"):
            waiting += links.files_outside(text, path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Inserts the parts that are made from the package, and leads links to pages of the site."""
    path = _repository_path(page.file.src_uri)
    if path == links.HOME:
        page.meta["hide"] = ["navigation"]
    part = BOOSTS.get(page.parent.title if page.parent else "", 1.0)
    page.meta.setdefault("search", {})["boost"] = 0.5 if page.file.src_uri.startswith(LOGS) else PAGE_BOOSTS.get(
        page.file.src_uri, part)
    for name, part in PARTS.items():
        if (mark := f"<!-- {name} -->") in markdown:
            # What stands between the mark and the next one is for readers of the repository.
            markdown = re.sub(rf"{mark}\n.*?<!-- end -->", lambda found, made=part: made(), markdown, flags=re.DOTALL)
    return links.for_site(markdown, path)


def on_config(config: Any) -> Any:
    """The package of this checkout is documented, wherever another one is installed."""
    sys.path.insert(0, str(links.ROOT))
    return config


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keeps a flag with its value in one line: browsers break lines after hyphens."""
    return re.sub(r"<code>(--[\w.-]+(?: [\w.-]+)?)</code>", r'<code class="flag">\1</code>', html)
