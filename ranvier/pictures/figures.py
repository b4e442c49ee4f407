"""Colours, and figures without a display, for all pictures.

They use matplotlib's Agg canvas directly, so that importing this module touches no display and no global figure state.
matplotlib is imported with the first figure: every rank imports this module, and only rank 0 draws.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ranvier.schedule.spans import Category

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Category, str] = {"forward": "#2B6CB0", "backward": "#E8912D", "weight": "#8CC5E8", "wait": "#EDEDED",
                                "reduce": "#C0659B", "optimizer": "#3A9A6B", "data": "#E3C94C", "report": "#6E6E6E",
                                "checkpoint": "#6B4E9B", "overhead": "#B9B2A6"}
"""Different in lightness as well as in hue, for colour-blind readers and greyscale prints."""
DARK = frozenset({"forward", "report", "checkpoint"})
"""Colours on which text is white."""
NAMES = {"weight": "weight gradient", "reduce": "gradient averaging", "data": "data loading", "report": "logging",
         "overhead": "engine overhead"}
INK, FAINT = "#222222", "#8A8A8A"
DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_title(axes: Axes, title: str) -> None:
    """Write a title, which may have users' names and dollar signs in it, above axes: in several lines if it is long."""
    lines = textwrap.fill(title, 85)  # the number of letters that fit into the narrowest picture
    axes.set_title(lines.replace("$", r"\$"), fontsize=12, color=INK, loc="left")


def remove_frame(axes: Axes) -> None:
    """Remove the frame at the top and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#BBBBBB")
    axes.tick_params(colors=INK, labelsize=9, length=3)
