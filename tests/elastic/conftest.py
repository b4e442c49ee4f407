"""Runs of this folder leave no pictures but where a test looks at them: drawing takes longer than training."""

from __future__ import annotations

import pytest

from ranvier.train import report


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    if "pictures" not in request.keywords:
        for draw in ("draw_course", "draw_loss", "draw_timeline"):
            monkeypatch.setattr(report, draw, lambda *args: None)
