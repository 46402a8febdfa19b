from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from evo_hpc.training.batch import collate
from evo_hpc.training.errors import UnsupportedModelError, WeightsError
from evo_hpc.training.policy import Policy


@pytest.fixture
def copy(tied_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied_folder, tmp_path / "model with space"))


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    merged = {**load_file(path), **tensors}
    save_file({name: t for name, t in merged.items() if t is not None}, path, metadata={"format": "pt"})


def test_round_trip_is_bit_equal(model_folder, tmp_path):
    policy = Policy.from_hf(model_folder, trainable=False, token_budget=64)
    policy.save_hf(tmp_path / "out", tokenizer_from=model_folder)
    before, after = load_file(model_folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()


def test_logits_are_those_of_transformers_from_the_saved_folder(model_folder, tmp_path, samples):
    policy = Policy.from_hf(model_folder, trainable=False, token_budget=4096)
    policy.save_hf(tmp_path / "out", tokenizer_from=model_folder)
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    batch = collate(samples(6, seed=1), torch.device("cpu"))
    with torch.no_grad():
        packed = policy.forward(batch)[0].split(batch.rows)
        for ids, logits in zip(batch.tokens[0].split(batch.rows), packed, strict=True):
            expected = reference(ids[None]).logits[0]
            assert expected.std() > 0.5
            assert (logits - expected).abs().max() < 1e-4


def test_sharded_safetensors_load(copy, tied_folder):
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in chosen}, copy / file)
        index.update(dict.fromkeys(chosen, file))
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    exported = Policy.from_hf(copy, trainable=False, token_budget=64).export_state()
    assert all(torch.equal(exported[name], tensors[name]) for name in names)


def test_missing_tensor_is_named(copy):
    edit_weights(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


def test_extra_tensor_is_named(copy):
    edit_weights(copy, **{"model.layers.2.input_layernorm.weight": torch.ones(64)})
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor model\.layers\.2\.input_layernorm\.weight"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


def test_misshapen_tensor_is_named(copy):
    edit_weights(copy, **{"model.norm.weight": torch.ones(63)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[63\], config\.json asks for \[64\]"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


def test_tied_head_that_differs_is_refused(copy):
    edit_weights(copy, **{"lm_head.weight": torch.zeros(32, 64)})
    with pytest.raises(WeightsError, match="tie_word_embeddings is true, but"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_truncated_file_is_named(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model with space/model\.safetensors: not a complete safetensors file"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


def test_absent_weights_are_named(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors does not exist"):
        Policy.from_hf(copy, trainable=False, token_budget=64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported: one of qwen3, qwen3_moe, qwen2, llama"),
        ({"model_type": "llama"}, "architectures is 'Qwen3ForCausalLM'; supported: 'LlamaForCausalLM'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
def test_other_architectures_are_refused(copy, fields, message):
    edit_config(copy, **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        Policy.from_hf(copy, trainable=False, token_budget=64)


def test_config_that_is_not_json_is_refused_with_its_line(copy):
    (copy / "config.json").write_text('{\n"model_type": \n')
    with pytest.raises(UnsupportedModelError, match=r"config\.json:3: not JSON"):
        Policy.from_hf(copy, trainable=False, token_budget=64)
