"""Weight files: several with an index, as transformers reads and writes them; torn and corrupted ones are named."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evo_hpc.rollout.model_folder import tensor_shapes
from evo_hpc.training.architectures import read_shape
from evo_hpc.training.errors import WeightsError
from evo_hpc.training.weight_files import INDEX, SINGLE, plan_files, read_folder, save_folder
from evo_hpc.training.weight_names import hf_shapes
from tests.training.tiny_models import write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole"), "moe-some-dense-tied")


def test_files_are_filled_in_order_and_a_large_tensor_has_one_of_its_own():
    sizes = {"a": (2,), "b": (2,), "c": (9,), "d": (1,), "e": (3, 1)}
    files = plan_files(sizes, 4, 16)
    assert list(files.values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert plan_files(sizes, 4, 68) == {SINGLE: list(sizes)}


def test_several_files_are_read_by_us_by_transformers_and_by_the_rollout_side(whole, tmp_path):
    shape, tensors = read_shape(whole), load_file(whole / SINGLE)
    streamed = ((name, tensors[name]) for name in reversed(list(hf_shapes(shape))))
    save_folder(tmp_path, streamed, shape, whole, max_shard_bytes=60_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors" and not (tmp_path / SINGLE).exists()
    assert sum(path.stat().st_size for path in files) < 1.2 * (whole / SINGLE).stat().st_size
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    got = read_folder(tmp_path, shape)
    assert set(got) == set(tensors) == set(index["weight_map"]) and all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert tensor_shapes(tmp_path) == {name: tuple(t.shape) for name, t in tensors.items()}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits for folder in (tmp_path, whole)]
    assert torch.equal(*logits)


def test_files_that_transformers_split_are_read(whole, tmp_path):
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path, max_shard_size="50KB")
    shape, tensors = read_shape(whole), load_file(whole / SINGLE)
    assert (tmp_path / INDEX).exists()
    got = read_folder(tmp_path, shape)
    assert set(got) == set(tensors) and all(torch.equal(got[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("bounds", [(60_000, 10**9), (10**9, 60_000), (60_000, 90_000)])
def test_a_second_save_leaves_nothing_of_the_first(whole, tmp_path, bounds):
    shape, tensors = read_shape(whole), load_file(whole / SINGLE)
    for i, bound in enumerate(bounds):
        save_folder(tmp_path, {name: tensor + i for name, tensor in tensors.items()}, shape, whole, max_shard_bytes=bound)
    expected = set(plan_files(hf_shapes(shape), 4, bounds[1]))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == expected and (tmp_path / INDEX).exists() == (len(expected) > 1)
    assert all(torch.equal(read_folder(tmp_path, shape)[name], tensors[name] + 1) for name in tensors)


def test_tensors_that_do_not_fit_the_config_are_not_saved(whole, tmp_path):
    shape, tensors = read_shape(whole), load_file(whole / SINGLE)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight was not given"):
        save_folder(tmp_path, {n: t for n, t in tensors.items() if n != "model.norm.weight"}, shape, whole, max_shard_bytes=60_000)
    assert not (tmp_path / INDEX).exists()
    with pytest.raises(WeightsError, match="tensor extra is not part"):
        save_folder(tmp_path, {**tensors, "extra": torch.ones(1)}, shape, whole)


def test_bytes_flipped_in_a_header_are_an_error_with_the_file_name(whole, tmp_path):
    """Whatever becomes of the header: either the same names, shapes and types are read, or WeightsError is raised."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    shape, path = read_shape(folder), folder / SINGLE
    original = path.read_bytes()
    rng, refused = random.Random(0), 0
    end = 8 + int.from_bytes(original[:8], "little")
    for trial in range(300):
        torn = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8))):
            torn[rng.randrange(8 if trial % 3 == 0 else end)] = rng.randrange(256)
        path.write_bytes(torn)
        try:
            tensors = read_folder(folder, shape)
            assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_shapes(shape)
        except WeightsError as error:
            assert str(folder) in str(error)
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a safetensors index"), ("[]", "not a safetensors index"), ('{"weight_map": ["a"]}', "not a safetensors index"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "not a safetensors index"), ('{"weight_map": {"a": 3}}', "not a safetensors index"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', r"model-1\.safetensors does not exist"), ("\udcff", "not a safetensors index"),
    ],
)
def test_a_broken_index_is_named(whole, tmp_path, content, message):
    (tmp_path / INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeightsError, match=message):
        read_folder(tmp_path, read_shape(whole))


def test_a_tensor_in_two_files_is_named(whole, tmp_path):
    shape = read_shape(whole)
    save_folder(tmp_path, load_file(whole / SINGLE), shape, whole, max_shard_bytes=60_000)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    save_file({**load_file(last), "model.embed_tokens.weight": torch.ones(32, 128)}, last)
    with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight is also in model-00001-of"):
        read_folder(tmp_path, shape)


def test_quantised_weights_are_refused(whole, tmp_path):
    tensors = load_file(whole / SINGLE)
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(WeightsError, match=r"q_proj\.weight has type I8; readable: F32, BF16, F16"):
        read_folder(tmp_path, read_shape(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_as_float32(whole, tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(whole / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE)
    got = read_folder(tmp_path, read_shape(whole))
    assert all(got[name].dtype == torch.float32 and torch.equal(got[name], tensors[name].float()) for name in tensors)
