"""Chat prompts and token ids of a Hugging Face model folder, without transformers or torch.

Text and ids come from the folder's own files: tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json,
generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from evo_hpc.errors import UserError

# The named special tokens that a chat template may refer to.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(UserError):
    """A model folder's tokenizer files are missing or unusable, or a chat template refused its messages."""


class VocabularyError(TokenizerError):
    """The tokenizer has ids that the model has no embedding for: the two do not belong together."""


class ChatTokenizer:
    """Renders chat messages to token ids and back; equal to transformers' `apply_chat_template` and `decode`."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, special_tokens: dict[str, str], eos_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self.eos_ids = eos_ids
        self.chat_template = template
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTokenizer:
        """The tokenizer of a Hugging Face model folder.

        Raises `TokenizerError` naming the file that is wrong; `VocabularyError` where config.json's vocab_size is too
        small for it (a larger one is padding, and fine).
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; a folder with a fast tokenizer (tokenizer.json) is needed")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises the bare class
            raise TokenizerError(f"{path}: {error}") from error
        _check_vocabulary(folder, tokenizer)
        # Padding and truncation settings in the file serve training; ids must be those of the text alone.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(folder, settings)
        eos_ids = _eos_ids(folder, tokenizer, special_tokens)
        return cls(tokenizer, _chat_template(folder, settings), special_tokens, eos_ids)

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer, added tokens included (the model's embedding may be padded beyond)."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token, if the folder names one."""
        return self._tokenizer.token_to_id(self._special_tokens.get("pad_token", ""))

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text. Raises `TokenizerError` if the template refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: text + a content that is null
            raise TokenizerError(f"chat template: {error}") from error

    def encode_prompt(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered prompt; the template alone places special tokens."""
        return self.encode_text(self.render(messages, add_generation_prompt=add_generation_prompt))

    def encode_continuation(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of what follows an assistant's finished response (end token included) when `messages` come next, up to where the
        assistant is to go on. So the ids of the response itself need not be made again from its text, which might give others.

        Raises `TokenizerError` where the template does not show what the assistant said.
        """
        mark = "\u241e a response \u241e"
        whole = self.render([{"role": "user", "content": "."}, {"role": "assistant", "content": mark}, *messages])
        _, found, rest = whole.partition(mark)
        if not found:
            raise TokenizerError("chat template: it leaves out what the assistant said, so a chat of several turns cannot be continued")
        ended = next((text for text in (self.decode([i]) for i in self.eos_ids) if text and rest.startswith(text)), "")
        return self.encode_text(rest.removeprefix(ended))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens visible."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decode_response(self, ids: Sequence[int]) -> str:
        """Text for the verifier: without the one end token that closed the response, any other special token visible.

        A response that writes `<user>` must not look like one that stopped there.
        """
        return self.decode(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of `{% generation %}...{% endgeneration %}`, which only marks text for training masks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # A template comes with a downloaded model: it is not trusted, hence the sandbox.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise TokenizerError(f"{path}: no such file")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return content


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    size = _read_json(folder / "config.json", required=False).get("vocab_size")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if size is None or not vocabulary:
        return
    token, largest = max(vocabulary.items(), key=lambda entry: entry[1])
    if largest >= size:
        raise VocabularyError(
            f"{folder / 'tokenizer.json'}: token {token!r} has id {largest}, but the model has ids below {size} only (vocab_size in "
            f"{folder / 'config.json'}): give the tokenizer that the model was trained with, or resize the model's embedding"
        )


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    # tokenizer_config.json wins over the older special_tokens_map.json.
    named = {**_read_json(folder / "special_tokens_map.json", required=False), **settings}
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise TokenizerError(f"{folder}: no chat template in chat_template.jinja or tokenizer_config.json")
    return template


def _eos_ids(folder: Path, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    # The engine stops at the generation configuration's ids and at the tokenizer's own end token: so must the reader.
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name, required=False).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    own = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if own is not None:
        ids.add(own)
    if not ids:
        raise TokenizerError(f"{folder}: no end token in generation_config.json, config.json or tokenizer_config.json")
    return tuple(sorted(ids))
