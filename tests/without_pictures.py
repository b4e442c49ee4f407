"""`python -m tests.without_pictures` is the command `ranvier` whose runs draw nothing, as those in the tests' own
process (`no_pictures` of conftest): drawing takes longer than a tiny run."""

from __future__ import annotations

from ranvier.cli.main import main
from ranvier.pictures import timeline_picture
from ranvier.train import pictures


def draws_nothing(*args: object) -> None:
    """In place of what `ranvier.train.report` imports."""


if __name__ == "__main__":
    for module, name in ((pictures, "draw_course"), (pictures, "draw_loss"), (timeline_picture, "timeline_picture")):
        setattr(module, name, draws_nothing)
    main()
