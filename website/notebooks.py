"""Notebooks of docs/ as pages of the site: their text, code and kept outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def as_page(path: Path) -> str:
    """The notebook as Markdown, with its pictures inside, and a link to the file beside the page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"````python\n{source}\n````", *_outputs(cell["outputs"])]
    parts.insert(1, f'This page is a notebook: <a href="{path.name}" download>{path.name}</a>.')
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[dict[str, Any]]) -> list[str]:
    """What a cell has printed, and then its pictures."""
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    pictures = ["".join(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    return [f'````text title="Output"\n{printed.rstrip()}\n````'] * bool(printed) + [
        f'<figure><img alt="" src="data:image/png;base64,{"".join(picture.split())}"></figure>' for picture in pictures]
