"""The standing table: the command's predictions against published steps, source by source.

    python -m benchmarks.planner.standing [--source NAME] [--output FILE]

Each file in benchmarks/planner/published is one source: where its figures are from, the cluster, settings of all rows,
models, and rows. A row is predicted only by `ranvier simulate FILE.toml --cluster CLUSTER --json`, with
`--as-published` if the source's stages wait for their messages. A row is foreign if the source's run had a property
that no setting describes; the row names that property. Rows that the command refuses are listed, and not counted.
Constants of a cluster are from data sheets and microbenchmarks, none from a row; rows of a device from which constants
are taken (calibrated) count in no median.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from benchmarks.record import results_file, write_results
from ranvier.cli.main import run_command
from ranvier.cost.cluster_files import load_cluster, write_cluster
from ranvier.pictures.figures import COLOURS, INK, new_figure, remove_frame

PUBLISHED = Path(__file__).parent / "published"
_CLOSE = 0.1
"""Share of a time by which two rows must differ for their order to count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published step. Times are seconds."""

    source: str
    what: str
    published: float
    predicted: float
    foreign: tuple[str, ...]
    calibrated: bool
    fits: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.predicted / self.published - 1.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of the rows of a source. ordered: share of the pairs of rows which differ by more than 10 % that are
    predicted in the published order, by throughput; correlation: Spearman's, of the same numbers."""

    source: str
    rows: int
    median_error: float
    correlation: float | None
    ordered: float | None


def sources() -> list[Path]:
    """The files of all sources."""
    return sorted(PUBLISHED.glob("*.toml"))


def rows_of(path: Path, say: Callable[[str], None] = print) -> Iterator[Row]:
    """A source's rows, each predicted."""
    source = tomllib.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        rows = [dict(zip(source["rows"]["columns"], values, strict=True)) for values in source["rows"]["values"]]
        _write_cluster(source, max(row["devices"] for row in rows), cluster)
        for number, row in enumerate(rows):
            settings, what = settings_of(source, row)
            run = Path(folder) / f"{number}.toml"
            run.write_text(tomli_w.dumps(_tree(settings)))
            found = simulated(run, cluster, source.get("as_published", False))
            if found is None:
                say(f"{source['name']:26} {what:60} refused")
                continue
            published = row["published"]
            if source["unit"] == "tokens/s/device":
                tokens = found["predicted"]["tokens_per_second"] * found["predicted"]["step_seconds"]
                published = tokens / (published * row["devices"])
            foreign = (*source["foreign"], *row.get("foreign", ()))
            made = Row(source=source["name"], what=what, published=published, predicted=found["step_seconds"],
                       foreign=foreign, calibrated=source.get("calibrated", False), fits=not found["excess"])
            say(f"{made.source:26} {made.what:60} {made.published:9.3f} {made.predicted:9.3f} {made.error:+7.1%}"
                f"{' foreign' if foreign else ''}{'' if made.fits else ' does not fit'}")
            yield made


def settings_of(source: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The settings of a row's run, by their names, and a text that distinguishes it from the others."""
    settings = {**source["settings"], **source["models"][row["model"]],
                **{name: value for name, value in row.items() if "." in name}}
    settings = {name: row[value] if value == "devices" else value for name, value in settings.items()}
    rows, stages = settings.get("mesh.row", 1), settings.get("mesh.pipe", 1)
    settings["mesh.data"] = row["devices"] // (rows * stages * settings.get("mesh.col", 1))
    settings["batch.microbatch-size"] *= rows  # published per device
    settings.setdefault("optim.shard", False)
    if settings.get("pipeline.stages-per-rank", 1) > 1:
        settings["pipeline.in-flight"] = 2 * stages  # as at the start of interleaved 1F1B (Narayanan et al., 2021)
        stages *= settings["pipeline.stages-per-rank"]
    if stages > 1 and "model.num-layers" in settings:  # stages with equal numbers of layers
        layers = settings["model.num-layers"]
        ends = 0 if layers % stages == 0 else 1  # whether embedding and head count as layers
        settings["pipeline.boundaries"] = [1 + 2 * ((layers + 2 * ends) * stage // stages - ends)
                                           for stage in range(1, stages)]
    differs = [f"{name.split('.')[-1]} {value}" for name, value in row.items()
               if "." in name and name not in ("batch.global-size",)]
    return settings, f"{row['model']} on {row['devices']}: {', '.join(differs)}"


def _write_cluster(source: Mapping[str, Any], devices: int, path: Path) -> None:
    """Write the source's cluster, with the source's changes, and at least this many devices."""
    cluster = load_cluster(source["cluster"])
    nodes = -(-devices // cluster.devices_per_node)
    write_cluster(replace(cluster, nodes=max(nodes, cluster.nodes)), path)
    tree = tomllib.loads(path.read_text())
    for name, value in source.get("cluster_changes", {}).items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
    path.write_text(tomli_w.dumps(tree))


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their names, as the tree of a file."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, setting = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[setting.replace("-", "_")] = value
    return tree


def simulated(run: Path, cluster: Path | str, as_published: bool) -> dict[str, Any] | None:
    """The command's prediction for a run file; None if the command refuses the file."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        code = run_command(["simulate", str(run), "--cluster", str(cluster), "--json",
                            *["--as-published"] * as_published])
    return None if code else json.loads(said.getvalue())


def summary(source: str, rows: list[Row]) -> Summary:
    """Summary of rows, including foreign ones."""
    right = in_order(rows)
    return Summary(source=source, rows=len(rows), median_error=median(abs(row.error) for row in rows),
                   correlation=spearman([row.published for row in rows], [row.predicted for row in rows]),
                   ordered=sum(right) / len(right) if right else None)


def in_order(rows: list[Row]) -> list[bool]:
    """For each pair of rows which differ enough: whether they are predicted in the published order."""
    return [(one.published < other.published) == (one.predicted < other.predicted)
            for one, other in combinations(rows, 2)
            if abs(one.published - other.published) > _CLOSE * min(one.published, other.published)]


def spearman(first: list[float], second: list[float]) -> float | None:
    """Rank correlation; None for fewer than three values."""
    if len(first) < 3:
        return None
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    return 1.0 - 6 * sum((one - other) ** 2 for one, other in zip(*places, strict=True)) / (count * (count ** 2 - 1))


def measure(names: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """All rows and summaries. names: names of sources; all sources if it is empty."""
    rows = [row for path in sources() if not names or path.stem in names for row in rows_of(path, say)]
    found = [summary(source, [row for row in rows if row.source == source])
             for source in dict.fromkeys(row.source for row in rows)]
    say(f"\n{'source':26} rows  median error  rank correlation  pairs in order")
    for one in found:
        correlation, ordered = (f"{value:.2f}" if value is not None else "" for value in (one.correlation, one.ordered))
        say(f"{one.source:26} {one.rows:4} {one.median_error:13.1%} {correlation:>17} {ordered:>15}")
    of_sources = [[row for row in rows if row.source == one.source and not row.calibrated] for one in found]
    counted = [abs(row.error) for each in of_sources for row in each]
    own = [abs(row.error) for each in of_sources for row in each if not row.foreign]
    pairs = [is_right for each in of_sources for is_right in in_order(each)]
    for what, errors in (("", counted), (" that are not foreign", own)):
        if errors:
            say(f"median error over {len(errors)} rows{what}: {median(errors):.1%}")
    if pairs:
        say(f"{sum(pairs)} of {len(pairs)} pairs of a source's rows in order")
    return {"rows": [{**asdict(row), "error": row.error} for row in rows], "sources": [asdict(one) for one in found],
            "median_error": median(counted) if counted else None, "median_error_own": median(own) if own else None,
            "pairs_in_order": sum(pairs) / len(pairs) if pairs else None}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the error of each row, by source: rows with published settings filled, foreign ones hollow."""
    figure = new_figure(9, 0.42 * len(results["sources"]) + 1.4)
    axes = figure.subplots()
    axes.axvspan(-15, 15, color="#EDEDED", zorder=0)
    for place, source in enumerate(results["sources"]):
        for row in (row for row in results["rows"] if row["source"] == source["source"]):
            axes.plot(100 * row["error"], place, "o", color=COLOURS["forward"], markersize=5,
                      fillstyle="none" if row["foreign"] else "full")
    axes.set_yticks(range(len(results["sources"])), [
        f"{one['source']}: {one['rows']} row{'s' * (one['rows'] > 1)}, {100 * one['median_error']:.0f} %"
        for one in results["sources"]])
    axes.invert_yaxis()
    axes.set_xlabel("predicted against published step, % (grey: within 15 %)\n"
                    "hollow: the source ran what no setting says")
    axes.set_title(f"Median error {100 * results['median_error']:.1f} %; {100 * results['pairs_in_order']:.0f} % of "
                   "pairs in the published order", fontsize=10, color=INK)
    remove_frame(axes)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", default=[], choices=[path.stem for path in sources()],
                        help="only this source; may be repeated")
    parser.add_argument("--output", type=Path, help="file of results; by default in benchmarks/results/planner")
    options = parser.parse_args()
    results = measure(options.source)
    path = options.output or results_file("planner", "standing")
    write_results(path, results)
    if results["rows"]:
        draw(results, path.with_suffix(".png"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
