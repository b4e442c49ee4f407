"""Presets are the published models: their numbers of parameters, and which settings override others."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from ranvier.checkpoint.hf.forms import form_of
from ranvier.config import read
from ranvier.config.presets import PRESETS
from ranvier.config.resolve import resolve
from ranvier.config.run import MeshSettings
from ranvier.models import families
from ranvier.models.llama import problems
from tests.errors import raises

PARAMETERS = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "olmo-2-1b": 1_484_916_736, "olmo-2-7b": 7_298_617_344, "olmo-2-13b": 13_716_198_400,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384}
"""Numbers of parameters according to the models' pages."""


def run_of(name, **flags):
    layers = [read.load(name)[1]]
    if flags:
        layers.append(read.Layer(origin="flag", values={f"model.{key}": str(value) for key, value in flags.items()},
                                 is_text=True))
    merged = read.merge(layers)
    assert merged.problems == ()
    return merged


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_numbers_of_parameters(name):
    config = run_of(name).run.model
    assert problems(config) == []
    assert sum(prod(place.shape) for place in form_of(config).places(config, "tokens").values()) == PARAMETERS[name]
    document = form_of(config).write(config, "tokens")
    assert document["max_position_embeddings"] == config.max_positions


def test_all_presets_are_tested():
    assert set(PARAMETERS) == set(PRESETS)


def test_what_overrides_what():
    merged = run_of("qwen3-0.6b", num_layers=3, sequence=64)
    assert (merged.run.model.num_layers, merged.run.model.sequence, merged.run.model.hidden) == (3, 64, 1024)
    assert merged.origins["model.hidden"] == "preset qwen3-0.6b" and merged.origins["model.num_layers"] == "flag"
    assert merged.chosen == {"model.num_layers", "model.sequence"}
    again = read.merge([read.from_dict(read.document(merged.run), "run.toml")])
    assert again.run == merged.run
    by_flag = read.merge([read.load("gpt-tiny")[1], read.Layer(
        origin="flag", values={"model.preset": "smollm2-135m"}, is_text=True)]).run
    assert by_flag.model.num_layers == 30 and by_flag.train.steps == 400
    none = read.Layer(origin="flag", values={"model.preset": "none"}, is_text=True)
    assert read.merge([none]).run.model.preset is None


def test_an_unknown_preset_is_refused():
    problem, = read.merge([read.Layer(origin="flag", values={"model.preset": "llama-9"}, is_text=True)]).problems
    assert (problem.code, problem.where, problem.value) == ("unknown-preset", "model.preset", "llama-9")
    with raises("unknown-recipe", "llama-3.1-8b"):
        read.load("llama-3.1-8")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-2-2b"])
def test_a_presets_facts_are_counted(name):
    run = resolve(replace(run_of(name).run, mesh=MeshSettings(data=1).with_sizes()))
    assert families.problems(run) == []
    assert families.flops_per_sample(run) > 6 * run.model.sequence * 0.8 * PARAMETERS[name]
    assert "key-value heads" in families.text(run)
