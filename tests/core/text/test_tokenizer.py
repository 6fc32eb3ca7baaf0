"""Ids, texts and chat prompts are those of transformers' AutoTokenizer on the same folder; bad input is refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ModelSourceError, RequestError
from octavo.core.testing.small_tokenizers import KINDS
from octavo.core.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "안녕하세요 세계",
    "你好，世界",
    "😀👩‍👩‍👧🇰🇷",
    "<s>a</s><|im_end|>\n",
    "nul\x00here",
    "x ** 2 # isn't\n\t",
]

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- endif %}{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}<|im_end|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson(indent=2) }}{{- "}" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>ipython\\n\\n" }}{{- message.content | tojson }}{{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(index=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{ bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}{%- continue %}{%- endif %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{ raise_exception('conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {{ '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA_3, "mistral": MISTRAL}

USER = {"role": "user", "content": " What's <b>2 & 2</b>? 😀 "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be 간결 brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 & 3?\n"}],
    "extra keys": [{**USER, "name": "Ann", "metadata": {"score": 1.5, "tags": ["x", None]}}],
}
CALL = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "é": [1, 2]}}}],
    },
    {"role": "tool", "content": "<4>"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sum> é", "parameters": {"type": "object"}}}]


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model's folder with a tokenizer of each kind."""
    return make_folder(tmp_path, request.param)


def make_folder(path: Path, kind: str = "byte_level", **config: Any) -> Path:
    KINDS[kind]().save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config})
    return path


def judge(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    """Encode with and without special tokens, decode with and without them."""
    ours, theirs = Tokenizer.from_folder(folder), judge(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    for text in TEXTS:
        for special in (True, False):
            token_ids = ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(token_ids, skip_special_tokens=special) == theirs.decode(
                token_ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_prompts_are_those_of_transformers(tmp_path: Path, template: str, conversation: str, prompt: bool) -> None:
    """Texts and ids of `apply_chat_template`, over templates as models bring them."""
    make_folder(tmp_path, "sentencepiece")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    ours, theirs, messages = Tokenizer.from_folder(tmp_path), judge(tmp_path), CONVERSATIONS[conversation]
    assert ours.render_chat(messages, add_generation_prompt=prompt) == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False
    )
    assert ours.encode_chat(messages, add_generation_prompt=prompt) == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, return_dict=False
    )


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_tools_are_rendered_as_transformers_does(tmp_path: Path, template: str) -> None:
    """Tool schemas and calls: no HTML escapes, no \\u escapes, None left out."""
    make_folder(tmp_path, chat_template=TEMPLATES[template])
    ours, theirs = Tokenizer.from_folder(tmp_path), judge(tmp_path)
    messages, tools = (CALL, None) if template == "llama3" else ([USER], TOOLS)  # that one knows calls alone
    text = ours.render_chat(messages, tools=tools)
    assert text == theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert "é" in text
    assert "&lt;" not in text


def test_todays_date(tmp_path: Path) -> None:
    """`strftime_now` gives the date on the wall."""
    make_folder(tmp_path, chat_template="{{ strftime_now('%Y') }}")
    before = datetime.now().year
    assert before <= int(Tokenizer.from_folder(tmp_path).render_chat([USER])) <= datetime.now().year


def test_one_bos_in_a_chat(tmp_path: Path) -> None:
    """The template writes it, so the tokenizer adds none; plain prompts get it from the tokenizer."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, "sentencepiece", chat_template=LLAMA_3))
    assert tokenizer.encode_chat([USER]).count(1) == tokenizer.encode("Hi").count(1) == 1


def test_named_templates(tmp_path: Path) -> None:
    """A list in the config, or files: `tool_use` serves requests with tools, `default` the others."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    for tokenizer in (
        Tokenizer.from_folder(make_folder(tmp_path, chat_template=named)),
        Tokenizer.from_folder(with_template_files(tmp_path, named)),
    ):
        assert tokenizer.render_chat([USER]) == "plain"
        assert tokenizer.render_chat([USER], tools=TOOLS) == "tools 1"


def with_template_files(path: Path, named: list[dict[str, str]]) -> Path:
    make_folder(path)
    (path / "additional_chat_templates").mkdir()
    (path / "chat_template.jinja").write_text(named[0]["template"], encoding="utf-8")
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(named[1]["template"], encoding="utf-8")
    return path


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    """As in transformers."""
    make_folder(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).render_chat([USER]) == "new" == judge(tmp_path).apply_chat_template([USER], tokenize=False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokenizer_json_decides_on_bos(tmp_path: Path, kind: str) -> None:
    """`add_bos_token` of older configs has no say beside it, as in transformers."""
    make_folder(tmp_path, kind, add_bos_token=kind == "byte_level", add_eos_token=True)
    assert Tokenizer.from_folder(tmp_path).encode("Hi") == judge(tmp_path).encode("Hi")


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    """They get the ids that transformers gives them, and count as special."""
    declared = {"pad_token": "<pad>", "additional_special_tokens": ["<a>", "<s>"]}
    decoder = {"406": {"content": "<later>", "special": False}, "405": {"content": "<sooner>", "special": True}}
    make_folder(tmp_path, **declared, added_tokens_decoder=decoder)
    ours, theirs = Tokenizer.from_folder(tmp_path), judge(tmp_path)
    text = "x<pad>y<a>z<sooner>w<later>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True) == "xyzw<later>"


def test_special_tokens_map_counts_where_the_config_is_silent(tmp_path: Path) -> None:
    """Older folders name their tokens in a file of its own, some as objects."""
    KINDS["byte_level"]().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_eos_ids_come_from_whoever_knows_best(tmp_path: Path) -> None:
    """generation_config.json, else config.json, else the tokenizer (fault 31)."""
    make_folder(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (2,)
    write(tmp_path, "config.json", {"eos_token_id": 3})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [4, 2]})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (4, 2)
    write(tmp_path, "generation_config.json", {"eos_token_id": None})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize("given", ["abc", "5", 2.5, True, float("inf"), {}, [1, "x"], [[1]], [1, None]])
def test_eos_ids_that_are_none(tmp_path: Path, given: Any) -> None:
    """Named with their file when the model is read, not a surprise when an engine is built."""
    make_folder(tmp_path)
    write(tmp_path, "generation_config.json", {"eos_token_id": given})
    with pytest.raises(ModelSourceError, match=r"generation_config\.json: eos_token_id must be a token id or a list of them, not "):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """A prompt is never cut in silence."""
    make_folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(tmp_path, "tokenizer.json", content)
    assert len(Tokenizer.from_folder(tmp_path).encode("a b c d e f")) > 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\ud83d", "prompt holds half a surrogate pair, U+D83D, at character 2: text was cut inside a character; send the whole"),
        (None, "prompt must be a string, not NoneType"),
        (b"ab", "prompt must be a string, not bytes"),
    ],
)
def test_text_that_cannot_be_encoded(tmp_path: Path, text: Any, message: str) -> None:
    """Refused with the place; in a chat it is the messages' fault."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template=CHATML))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode(text)
    assert str(caught.value).startswith(message)
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=r"^messages holds half a surrogate pair, U\+D83D"):
        tokenizer.encode_chat([{"role": "user", "content": "ab\ud83d"}])


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        ([], "messages", "messages is empty: send at least one message"),
        ("Hi", "messages", "messages must be a list of messages, not str"),
        ({"role": "user"}, "messages", "messages must be a list of messages, not dict"),
        ([USER, "Hi"], "messages[1]", 'messages[1] must be an object such as {"role": "user", "content": "Hi"}, not str'),
        ([{"content": "Hi"}], "messages[0].role", 'messages[0].role must be a string such as "user", not None'),
        ([{"role": 3, "content": "Hi"}], "messages[0].role", 'messages[0].role must be a string such as "user", not 3'),
        ([USER, {"role": "u"}], "messages[1].content", "messages[1].content is missing: only a message with tool_calls may leave it out"),
        ([{"role": "user", "content": 5}], "messages[0].content", "messages[0].content must be a string or a list of text parts, not int"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1]",
            'messages[0].content[1] must be {"type": "text", "text": "..."}; this engine reads text only',
        ),
        ([{**USER, "extra": {"x": [object()]}}], "messages[0].extra.x[0]", "messages[0].extra.x[0] must be JSON data, not object"),
    ],
)
def test_malformed_messages(tmp_path: Path, messages: Any, field: str, message: str) -> None:
    """Index, field and what should stand there."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template=CHATML))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(messages)
    assert (str(caught.value), caught.value.field) == (message, field)


def test_a_tool_must_be_a_schema(tmp_path: Path) -> None:
    """Not a function, not a name."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template=CHATML))
    with pytest.raises(RequestError, match=r"^tools\[0\] must be a JSON schema object, not str$"):
        tokenizer.render_chat([USER], tools=["add"])  # type: ignore[list-item]
    for tools, kind in ((5, "int"), ({"type": "function"}, "dict")):
        with pytest.raises(RequestError, match=f"^tools must be a list of JSON schema objects, not {kind}$"):
            tokenizer.render_chat([USER], tools=tools)  # type: ignore[arg-type]


def test_messages_that_hold_themselves(tmp_path: Path) -> None:
    """Or are nested so deeply that it comes to the same."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template=CHATML))
    message: dict[str, Any] = dict(USER)
    message["extra"] = message
    with pytest.raises(RequestError, match=r"^messages or tools are nested too deeply, or hold themselves$"):
        tokenizer.render_chat([message])


def test_text_parts_are_joined(tmp_path: Path) -> None:
    """OpenAI's list of parts, for templates that know strings only."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template="{{ messages[0].content }}"))
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "Hello world"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            MISTRAL,
            "the model's chat template can't render these messages: conversation roles must alternate user/assistant",
        ),
        ("{{ None + 'a' }}", "the model's chat template can't render these messages: unsupported operand"),
        ("{{ messages.append(1) }}", "the model's chat template can't render these messages: access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "the model's chat template can't render these messages: access to attribute '__class__'"),
        ("a\n{% if %}", "the model's chat template is broken at line 2: Expected an expression, got 'end of statement block'; mend"),
    ],
)
def test_template_errors_are_the_requests(tmp_path: Path, template: str, message: str) -> None:
    """Refusals of the template, its bugs, what the sandbox forbids, and bad syntax: one request fails, not the engine."""
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat([USER, USER])
    assert str(caught.value).startswith(message)
    assert caught.value.field == "messages"


def test_no_template(tmp_path: Path) -> None:
    """What to do about it."""
    with pytest.raises(RequestError) as caught:
        Tokenizer.from_folder(make_folder(tmp_path)).encode_chat([USER])
    assert str(caught.value) == (
        "this model has no chat template, so messages can't be turned into a prompt: send a plain prompt instead, "
        "or put a chat_template.jinja into the model's folder"
    )


def test_unreadable_folders(tmp_path: Path) -> None:
    """Missing, damaged and misshapen files are named."""
    with pytest.raises(ModelSourceError, match=r"holds no tokenizer\.json; transformers can write one: AutoTokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json can't be read as a tokenizer: "):
        Tokenizer.from_folder(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"config\.json is not valid JSON: "):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"config\.json is not valid JSON: maximum recursion depth"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"config\.json must hold a JSON object, not list"):
        Tokenizer.from_folder(tmp_path)


def test_text_needs_neither_torch_nor_transformers() -> None:
    """Seconds of imports that a tokenizer doesn't need."""
    code = (
        "import sys, octavo.core.text.output_text, octavo.core.text.tokenizer, octavo.core.sampling_params\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
