"""One file of a project on the package indexes that pip is set up with: fetched, and nothing else.

    python -m ranvier.data.pip_file PROJECT FILENAME        the file, in this folder

`pip download` runs a source distribution's own code to learn its metadata, with --no-deps too, and before anybody has
compared a checksum. This takes the file as it is, by its name. Settings of pip hold (index-url, find-links, no-index,
proxies, certificates, credentials), since pip's own session reads the index and the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def fetch_file(project: str, filename: str, folder: Path) -> bool:
    """Write `filename`, one of the files of `project`, into `folder`; whether there is one. Whatever pip raises."""
    from pip._internal.commands import create_command

    command = create_command("download")
    options, _ = command.parser.parse_args([])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options=options, session=session, ignore_requires_python=True)
        links = [candidate.link for candidate in finder.find_all_candidates(project)]
        for link in links:
            if link.filename == filename:
                with session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"},
                                 stream=True) as answer, open(folder / filename, "wb") as file:
                    answer.raise_for_status()
                    while block := answer.raw.read(_BLOCK_BYTES):
                        file.write(block)
                return True
    return False


def main(project: str, filename: str) -> int:
    try:
        found = fetch_file(project, filename, Path.cwd())
    except ImportError as error:
        print(f"needs pip: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # whatever pip, the network or an index raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if not found:
        print(f"no index that pip is set up with has {filename} of {project}", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
