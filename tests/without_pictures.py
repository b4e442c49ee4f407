"""`python -m tests.without_pictures` is the command `ranvier` whose runs draw nothing, like runs in the tests' own
process (`short_measurements` of conftest), because drawing takes longer than a tiny run."""

from __future__ import annotations

from functools import partial

from ranvier.cli.main import main
from ranvier.pictures import timeline_picture
from ranvier.train import metrics, report


def draws_nothing(*args: object) -> None:
    """Replaces the functions that draw."""


if __name__ == "__main__":
    for module, name in ((report, "draw_elastic_run"), (report, "draw_loss"), (report, "timeline_picture"),
                         (timeline_picture, "timeline_picture")):
        setattr(module, name, draws_nothing)
    metrics.matrix_product_rate = partial(metrics.matrix_product_rate, seconds=0.0)
    main()
