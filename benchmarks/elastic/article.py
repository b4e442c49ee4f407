"""PipeTransformer's own experiments (He et al., 2021), predicted: two machines with eight Quadro RTX 5000 each.

    python -m benchmarks.elastic.article

The planner follows each run as it would a user's: the same decisions, memory and costs as `ranvier plan`. The baseline
is the article's, GPipe with data parallelism (pipe 8 x data 2, 2 K microbatches) without freezing; the table also has
the same mesh with message-driven stages, and data parallelism alone, if it fits. Device and links are those of the
shipped cluster `frontera`, whose shares were calibrated on the same device in fp32; bandwidths are those of the article
(PCI 3.0, and 5 GB/s of InfiniBand). The article states the models, data sets, about 400 and 64 samples for each
pipeline, and alpha 1/3 for the figure of its parts; ten epochs are assumed for all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import results_file, write_results
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, Data, Elastic, Pipeline, Run, Train, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.mesh import Mesh
from ranvier.planner.candidates import predict
from ranvier.planner.elastic_plan import Course, course
from ranvier.planner.work import Work

EPOCHS = 10
PARTS = {
    "freezing alone": Elastic(freeze="cap"),
    "AutoPipe, AutoCache": Elastic(freeze="cap", auto_pipe=True, cache=True, cache_bytes=10 ** 12),
    "AutoPipe, AutoDP": Elastic(freeze="cap", auto_pipe=True, auto_dp=True),
    "all": Elastic(freeze="cap", auto_pipe=True, auto_dp=True, cache=True, cache_bytes=10 ** 12),
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """task, data: as --data.task and --data.train. samples: samples of a training epoch. batch: samples for each
    pipeline. published: the article's speed-up by part."""

    name: str
    task: str
    data: str
    model: Transformer
    samples: int
    batch: int
    published: dict[str, float]

    def run(self, elastic: Elastic, policy: str = "gpipe") -> ResolvedRun:
        """The run on pipe 8 x data 2, with 16 microbatches for each pipeline."""
        return resolve(Run(mesh=Mesh(pipe=8, data=2), precision="fp32", model=self.model, elastic=elastic,
                           batch=Batch(global_size=2 * self.batch, microbatch_size=self.batch // 16),
                           pipeline=Pipeline(policy=policy), train=Train(epochs=EPOCHS),
                           data=Data(task=self.task, train=self.data, train_samples=self.samples)))


VIT = Transformer(num_layers=12, hidden=768, heads=12, image_size=224, patch_size=16)
EXPERIMENTS = (
    Experiment(name="ViT-B/16, ImageNet", task="images", data="imagenet", samples=1_281_167, batch=400,
               model=replace(VIT, num_classes=1000),
               published={"freezing alone": 0.95, "AutoPipe, AutoCache": 1.26, "AutoPipe, AutoDP": 2.27, "all": 2.83}),
    Experiment(name="ViT-B/16, CIFAR-100", task="images", data="cifar100", samples=50_000, batch=400,
               model=replace(VIT, num_classes=100), published={"all": 2.44}),
    Experiment(name="BERT-large, SQuAD 1.1", task="qa", data="squad", samples=87_599, batch=64, published={"all": 2.10},
               model=Transformer(num_layers=24, hidden=1024, heads=16, sequence=384, vocab=30522)),
)


def article_cluster() -> Cluster:
    """The article's two machines."""
    known = load_cluster("frontera")
    return replace(known, name="PipeTransformer", nodes=2, devices_per_node=8,
                   inside=replace(known.inside, bandwidth=15.754e9),
                   between=replace(known.between, bandwidth=5e9, single=min(known.between.single or 5e9, 5e9)))


def predicted(experiment: Experiment, cluster: Cluster) -> Iterator[tuple[str, str, Course | None, float, str]]:
    """(part, global batch, its course, its speed over the baseline, why it is impossible) of each part."""
    work, baseline = Work(), predict(experiment.run(Elastic()), cluster)
    steps = -(-experiment.samples * EPOCHS // (2 * experiment.batch))
    yield "none", "", None, 1.0, baseline.reason
    whole = baseline.cost.seconds * steps
    ours = experiment.run(Elastic(), "message-driven")
    for name, run in (("none, message-driven", ours), ("none, data 16", replace(ours, mesh=Mesh(data=16)))):
        other = predict(run, cluster, work)
        yield name, "", None, baseline.cost.seconds / other.cost.seconds, other.reason
    for part, elastic in PARTS.items():
        for batch in ("keep", "grow") if elastic.auto_dp else ("keep",):
            run = experiment.run(replace(elastic, global_batch=batch))
            found = course(run, cluster, work)
            assert found is not None  # the cap freezes by epochs, and their length is given
            yield part, batch, found, whole / found.seconds, ""


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the second experiment only")
    parser.add_argument("--out", type=Path, help="the table's JSON file")
    options = parser.parse_args()
    cluster, rows = article_cluster(), []
    for experiment in EXPERIMENTS[1:2] if options.quick else EXPERIMENTS:
        print(experiment.name)
        for part, batch, found, speed, reason in predicted(experiment, cluster):
            meshes = [] if found is None else [
                (period.frozen, f"pipe {period.mesh.pipe} x data {period.mesh.data}") for period in found.periods]
            published = experiment.published.get(part)
            print(f"  {part:22} {batch:5} {speed:5.2f}" + (f"   published {published}" if published else "")
                  + (f"   {reason}" if reason else ""), flush=True)
            for frozen, mesh in meshes:
                print(f"      {frozen:2} layers frozen: {mesh}")
            rows.append({"experiment": experiment.name, "part": part, "global_batch": batch, "speedup": speed,
                         "published": published, "meshes": meshes, "reason": reason,
                         "hours": None if found is None else found.seconds / 3600})
    write_results(options.out or results_file("elastic", "article", quick=options.quick), {"rows": rows})


if __name__ == "__main__":
    main()
