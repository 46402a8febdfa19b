"""The chat tokenizer equals transformers on the demo policy's folder, and refuses what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.domains.arithmetic.policy import (
    EOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCABULARY,
    model_config,
    write_policy_files,
)
from evo_hpc.domains.tokenizer import ChatTokenizer, TokenizerError, VocabularyError

CONVERSATIONS = [
    [{"role": "user", "content": "134+528"}],
    [{"role": "system", "content": "Show the carry: né\n\t \U0001f600"}, {"role": "user", "content": "1+2 = ?"}],
    [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "1+2=3;#3"},
        {"role": "user", "content": "<eos>4"},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy 'x'")
    write_policy_files(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def reference_ids(reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
    encoded = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=True)
    return list(encoded["input_ids"])


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_equals_transformers(
    tokenizer: ChatTokenizer, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    ids = tokenizer.encode_prompt(messages, add_generation_prompt=add_generation_prompt)
    assert ids == reference_ids(reference, messages, add_generation_prompt)
    assert tokenizer.decode(ids) == reference.decode(ids)
    everything = list(range(len(VOCABULARY))) * 2
    assert tokenizer.decode(everything) == reference.decode(everything) == "".join(VOCABULARY) * 2
    assert (reference.pad_token_id, reference.eos_token_id) == (PAD_ID, EOS_ID) == (tokenizer.pad_id, 1)


def test_prompt_is_what_the_template_says(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.render(CONVERSATIONS[0]) == "<user>134+528<assistant>"
    assert len(tokenizer.encode_prompt(CONVERSATIONS[0])) == 9
    assert tokenizer.render(CONVERSATIONS[2]) == "<user>1+2<assistant>1+2=3;#3<eos><user><eos>4<assistant>"


@given(st.text("0123456789+-=;#? \n", max_size=50))
def test_text_round_trip(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_any_text_is_one_id_a_character(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    expected = [VOCABULARY.index(c) if c in VOCABULARY else VOCABULARY.index("<unk>") for c in text]
    if not any(token in text for token in SPECIAL_TOKENS):
        assert ids == expected


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40))
def test_every_id_decodes_to_its_symbol(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == "".join(VOCABULARY[i] for i in ids)


def test_only_the_closing_end_token_is_hidden(tokenizer: ChatTokenizer) -> None:
    user = VOCABULARY.index("<user>")
    three = tokenizer.encode_text("#3")
    assert tokenizer.decode_response([*three, EOS_ID]) == "#3"
    assert tokenizer.decode_response(three) == "#3"
    assert tokenizer.decode_response([*three, EOS_ID, EOS_ID]) == "#3<eos>"
    assert tokenizer.decode_response([*three, user, EOS_ID]) == "#3<user>"
    assert tokenizer.decode_response([]) == tokenizer.decode_response([EOS_ID]) == ""


def test_the_model_has_one_embedding_a_symbol() -> None:
    assert model_config()["vocab_size"] == len(VOCABULARY) == len(set(VOCABULARY)) == 24
    assert len(VOCABULARY) % 8 == 0


def test_template_refuses_unknown_roles_and_null_content(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(TokenizerError, match="unknown role: tool"):
        tokenizer.encode_prompt([{"role": "tool", "content": "1"}])
    with pytest.raises(TokenizerError, match="chat template: "):
        tokenizer.encode_prompt([{"role": "user", "content": None}])


def rewrite(folder: Path, name: str, **changes: Any) -> None:
    content = json.loads((folder / name).read_text())
    content.update(changes)
    (folder / name).write_text(json.dumps(content))


def test_end_tokens_come_from_the_generation_configuration_and_the_tokenizer(tmp_path: Path) -> None:
    write_policy_files(tmp_path)
    rewrite(tmp_path, "generation_config.json", eos_token_id=[0, 4])
    assert ChatTokenizer.from_folder(tmp_path).eos_ids == (0, 1, 4)
    (tmp_path / "generation_config.json").unlink()
    rewrite(tmp_path, "config.json", eos_token_id=2)
    assert ChatTokenizer.from_folder(tmp_path).eos_ids == (1, 2)
    rewrite(tmp_path, "config.json", eos_token_id=None)
    rewrite(tmp_path, "tokenizer_config.json", eos_token={"content": "<user>", "special": True})
    assert ChatTokenizer.from_folder(tmp_path).eos_ids == (4,)
    rewrite(tmp_path, "tokenizer_config.json", eos_token=None)
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(TokenizerError, match="no end token"):
        ChatTokenizer.from_folder(tmp_path)


TEMPLATES = [
    "{{ messages | tojson }} <&>",
    "{{ bos_token }}{{ eos_token }}|{{ tools }}|"
    "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}{% endif %}x{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_other_models_render_as_in_transformers(tmp_path: Path, template: str, reference: Any) -> None:
    write_policy_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": " <1+2> é"}, {"role": "user", "content": "3"}]
    options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    rendered = reference.apply_chat_template(messages, **options)
    assert ChatTokenizer.from_folder(tmp_path).render(messages) == rendered


def test_named_templates_in_the_configuration(tmp_path: Path) -> None:
    write_policy_files(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    rewrite(tmp_path, "tokenizer_config.json", chat_template=named)
    assert ChatTokenizer.from_folder(tmp_path).render(CONVERSATIONS[0]) == "134+528"
    rewrite(tmp_path, "tokenizer_config.json", chat_template=named[:1])
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatTokenizer.from_folder(tmp_path)


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    write_policy_files(tmp_path)
    for template in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(TokenizerError, match="chat template"):
            ChatTokenizer.from_folder(tmp_path).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", "{", "tokenizer.json: "),
        ("tokenizer_config.json", None, "tokenizer_config.json: no such file"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("config.json", None, None),
        ("config.json", "[]", "config.json: must hold a JSON object"),
        ("generation_config.json", "[]", "generation_config.json: must hold a JSON object"),
        ("chat_template.jinja", "{% for %}", "chat template, line 1"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, name: str, content: str | None, message: str | None) -> None:
    write_policy_files(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    if message is None:  # not needed where the generation configuration names the end tokens
        ChatTokenizer.from_folder(tmp_path)
        return
    with pytest.raises(TokenizerError, match=message):
        ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("size", "fits"), [(23, False), (24, True), (64, True)])
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path, size: int, fits: bool) -> None:
    """A larger vocab_size is an embedding padded for speed."""
    write_policy_files(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    if fits:
        assert ChatTokenizer.from_folder(tmp_path).vocab_size == 24
        return
    with pytest.raises(VocabularyError, match=r"tokenizer\.json: token '\\n' has id 23, but the model has ids below 23 only") as caught:
        ChatTokenizer.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_added_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    """The usual way: a token added to the tokenizer, the embedding not resized; ids need not be dense."""
    write_policy_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 24, "content": "<tool>"})
    path.write_text(json.dumps(content))
    with pytest.raises(VocabularyError, match="token '<tool>' has id 24"):
        ChatTokenizer.from_folder(tmp_path)
