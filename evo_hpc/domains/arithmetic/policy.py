"""The demo policy's model folder, apart from its weights: character tokenizer, chat template, Qwen3 configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-=;#? \n"
# Exactly 24 symbols: a multiple of 8, so every id the model can sample has a symbol.
VOCABULARY = (*SPECIAL_TOKENS, *CHARACTERS)
PAD_ID, EOS_ID = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role: ' + message['role']) -}}
    {%- endif -%}
    {{- '<' + message['role'] + '>' + message['content'] -}}
    {%- if message['role'] == 'assistant' -%}
        {{- eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<assistant>' -}}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """One token a character; a character outside the vocabulary is `<unk>`."""
    ids = {symbol: index for index, symbol in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def model_config() -> dict[str, Any]:
    """Content of config.json: a Qwen3 of 0.45 million parameters, embeddings tied."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def policy_files() -> dict[str, str | dict[str, Any]]:
    """Every file of the model folder but the weights: name -> text, or an object to be written as JSON."""
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_config()["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **named,
    }
    return {
        "config.json": model_config(),
        "generation_config.json": {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
        "tokenizer.json": build_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": settings,
        "special_tokens_map.json": named,
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def write_policy_files(folder: Path) -> None:
    """Writes `policy_files` into `folder` (made if absent)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in policy_files().items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
