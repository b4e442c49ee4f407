"""How well the planner's constants generalize: each published row is predicted with constants fitted without that row.

    python -m benchmarks.planner.calibration

Five constants of Frontera are free (Optimus' Tables 2 and 3, 16 rows), and four of Summit (AxoNN's times and shares of
the peak, 8 numbers). Starting from the shipped files' values, each is multiplied by a factor between 1/2 and 2, one
after the other and again, until nothing improves the sum of squared logarithms of predicted over published of the other
rows. Then the left-out row is predicted. An error that is much larger than with all rows would mean that the constants
were fitted to the row rather than to the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, log
from pathlib import Path
from statistics import median

from benchmarks.planner.papers import OPTIMUS, Papers, Row
from benchmarks.record import results_file, write_results
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.planner.work import Work

FRONTERA = ("device.rates.fp32.share", "device.memory_share", "inside.share", "between.single",
            "inside.latency_seconds")
SUMMIT = ("device.rates.fp16.share", "device.operation_seconds", "between.share", "chunk_seconds")
FACTORS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
_LOWEST, _HIGHEST = 0.5, 2.0


def with_factors(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """The cluster with these of its constants multiplied; shares stay at most 1."""
    for path, factor in factors.items():
        cluster = _scaled(cluster, path.split("."), factor)
    return cluster


def _scaled(node, names: Sequence[str], factor: float):
    first, *rest = names
    inner = node[first] if isinstance(node, dict) else getattr(node, first)
    most = 1.0 if first.endswith("share") else inf
    value = _scaled(inner, rest, factor) if rest else min(most, inner * factor)
    return {**node, first: value} if isinstance(node, dict) else replace(node, **{first: value})


def misfit(rows: Sequence[Row], left_out: int | None) -> float:
    """Sum of squared logarithms over all rows but one; for a range, from its nearer end."""
    return sum(log(1.0 + row.error) ** 2 for number, row in enumerate(rows) if number != left_out)


def fitted(predict: Callable[[Mapping[str, float]], list[Row]], constants: Sequence[str], left_out: int | None
           ) -> dict[str, float]:
    """Factors that fit the rows best."""
    factors, least = dict.fromkeys(constants, 1.0), inf
    best = misfit(predict(factors), left_out)
    while best < least - 1e-6:
        least = best
        for name in constants:
            for factor in FACTORS:
                tried = {**factors, name: min(_HIGHEST, max(_LOWEST, factors[name] * factor))}
                value = misfit(predict(tried), left_out)
                if value < best - 1e-9:
                    best, factors = value, tried
    return factors


def optimus_rows(work: Work) -> Callable[[Mapping[str, float]], list[Row]]:
    cluster = load_cluster("frontera")

    def predict(factors: Mapping[str, float]) -> list[Row]:
        """Forward and backward of a row count as one row: they are left out together."""
        papers, rows = Papers(frontera=with_factors(cluster, factors), work=work), []
        for scaling, scheme, devices, batch, hidden, forward, backward in OPTIMUS:
            rows.append(Row(what=f"{scaling} scaling, {scheme} on {devices}", unit="s", published=forward + backward,
                            predicted=sum(papers.optimus_seconds(scheme, devices, batch, hidden))))
        return rows

    return predict


def axonn_rows(work: Work) -> Callable[[Mapping[str, float]], list[Row]]:
    cluster = load_cluster("summit")

    def predict(factors: Mapping[str, float]) -> list[Row]:
        papers = Papers(summit=with_factors(cluster, factors), work=work)
        return [row for row in papers.axonn_rows(others=False) if "memory" not in row.what]

    return predict


def judged(predict: Callable[[Mapping[str, float]], list[Row]], constants: Sequence[str]) -> dict:
    """Every row's error with the shipped constants, with constants fitted to all rows, and with those fitted without
    the row."""
    shipped, everything = predict(dict.fromkeys(constants, 1.0)), fitted(predict, constants, None)
    whole, rows = predict(everything), []
    for number, row in enumerate(shipped):
        without = fitted(predict, constants, number)
        rows.append({"what": row.what, "shipped": row.error, "fitted": whole[number].error,
                     "left_out": predict(without)[number].error, "factors": without})
        print(f"{row.what}: {row.error:+.1%} as shipped, {whole[number].error:+.1%} fitted, "
              f"{rows[-1]['left_out']:+.1%} left out", flush=True)
    medians = {name: median(abs(row[name]) for row in rows) for name in ("shipped", "fitted", "left_out")}
    print("median: " + ", ".join(f"{name} {value:.1%}" for name, value in medians.items()), flush=True)
    return {"constants": list(constants), "factors": everything, "rows": rows, "median": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    work = Work()
    results = {"frontera": judged(optimus_rows(work), FRONTERA), "summit": judged(axonn_rows(work), SUMMIT)}
    path = options.output or results_file("planner", "calibration")
    write_results(path, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
