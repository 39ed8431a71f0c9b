"""The formats that models write tool calls in: found from the template, read strictly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import user
from stepgym.model.call_format import find_tool_support
from stepgym.model.delimiters import Delimiters
from stepgym.model.json_calls import JsonCalls, NamedJsonCalls
from stepgym.model.renderer import Renderer
from stepgym.model.template import ChatTemplate
from stepgym.model.tool_calls import Call, Calls, ToolCallFormat, check_wire_calls, wire_calls
from stepgym.model.xml_calls import XmlCalls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "deep": {"type": "object"},
                    "many": {"type": "array"},
                    "yes": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "either": {"type": ["integer", "null"]},
                    "pick": {"enum": [1, 2]},
                },
            },
        },
    }
]
HERMES = JsonCalls()
BARE = JsonCalls(open="", close="", arguments_key="parameters")
MISTRAL = JsonCalls(open="[TOOL_CALLS]", close="", listed=True, id_key="id")


def read(form: ToolCallFormat, text: str) -> Calls:
    return form.read(text, text, TOOLS)


# ---- JSON -----------------------------------------------------------------------------------------------------------


def test_hermes_calls_and_the_text_around_them() -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"count": %d}}\n</tool_call>'
    calls = read(HERMES, "I look.\n" + call % 1 + "\n" + call % 2 + "\nand wait")
    assert calls.found == [Call("find", {"count": 1}), Call("find", {"count": 2})]
    assert (calls.content, calls.invalid) == ("I look.\n\n\nand wait", [])
    assert read(HERMES, " no call ").content == " no call "


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{}", "never closed"),
        ("{}</tool_call>", "without <tool_call>"),
        ("<tool_call>{'name': 'find'}</tool_call>", "not JSON"),
        ("<tool_call>[]</tool_call>", "not a JSON object"),
        ('<tool_call>{"name": "find", "arguments": "{}"}</tool_call>', "must be a JSON object, not str"),
        ('<tool_call>{"function": "find", "arguments": {}}</tool_call>', "'name' is missing"),
        ('<tool_call><tool_call>{"name": "find", "arguments": {}}</tool_call>', "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ('<tool_call>{"name": "find", "arguments": {"text": "\\ud83d"}}</tool_call>', "surrogate"),
        ('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "surrogate"),
        ('<tool_call>{"name": "find", "arguments": {"share": NaN}}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "find", "arguments": {"share": 1e999}}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "find", "arguments": {}} so </tool_call>', "not JSON"),
    ],
)
def test_hermes_calls_that_are_none(text: str, problem: str) -> None:
    calls = read(HERMES, text)
    assert not calls.found
    assert problem in calls.invalid[0]["error"]
    assert len(calls.invalid[0]["text"]) <= 2000


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
@pytest.mark.parametrize("said", ["</tool_call>", "<tool_call>", "<tool_call>{}</tool_call>", "[TOOL_CALLS]", '\\"}]'])
def test_delimiters_inside_a_string_of_a_call_are_a_part_of_it(form: JsonCalls, said: str) -> None:
    body = f'{{"name": "find", "arguments": {{"text": "{said}"}}}}'
    whole = (
        f"[TOOL_CALLS][{body}, {body}]"
        if form.listed
        else f"<tool_call>{body}</tool_call>\n<tool_call>{body}</tool_call>"
    )
    calls = read(form, "So: " + whole)
    assert calls.found == [Call("find", {"text": json.loads(f'"{said}"')})] * 2
    assert (calls.content, calls.invalid) == ("So:", [])


@pytest.mark.parametrize("value", ["\\ud83d", "NaN", "-Infinity"])
def test_arguments_that_no_json_can_hold_are_refused_in_every_format(value: str) -> None:
    text = f'"{value}"' if value.startswith("\\") else value
    for form, said in (
        (BARE, f'{{"name": "find", "parameters": {{"deep": [{text}]}}}}'),
        (NamedJsonCalls(), f'[TOOL_CALLS]find[ARGS]{{"deep": [{text}]}}'),
        (XmlCalls(), xml(deep=f'{{"a": [{text}]}}')),
    ):
        calls = read(form, said)
        assert not calls.found
        assert "not JSON" in calls.invalid[0]["error"]
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": f'{{"deep": [{text}]}}'}}
    assert check_wire_calls([call])[1]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "find", "parameters": {"count": 1}}', ["find"]),
        ('\n<|python_tag|>{"name": "find", "parameters": {}}', ["find"]),
        ('{"name": "find", "parameters": {}}; {"name": "other", "parameters": {}}', ["find", "other"]),
    ],
)
def test_bare_calls(text: str, names: list[str]) -> None:
    calls = read(BARE, text)
    assert [call.name for call in calls.found] == names
    assert (calls.content, calls.invalid) == ("", [])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "find", "parameters": {"count": 1}',
        '{"name": "find", "parameters": {}} and then',
        '{"name": "find", "parameters": [1]}',
        '{"name": "find", "arguments": {}}',
        '{"name": "", "parameters": {}}',
        '{"name": "find"}',
        'I will call {"name": "find", "parameters": {"count": 1}} now',
        "<|python_tag|>find(count=1)",
    ],
)
def test_bare_text_that_looks_like_a_call_is_reported(text: str) -> None:
    calls = read(BARE, text)
    assert calls.invalid
    assert not calls.found


@pytest.mark.parametrize(
    "text", ["42", '{"answer": 42}', "{not JSON at all", 'see {"name": "Ann", "parameters": {}}', '{"name": "Ann"}', ""]
)
def test_bare_text_that_says_nothing_of_a_tool_is_an_answer(text: str) -> None:
    calls = read(BARE, text)
    assert (calls.content, calls.found, calls.invalid) == (text, [], [])


def test_mistral_calls_are_a_list_with_ids_of_their_own() -> None:
    body = '[{"name": "find", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "find", "arguments": {}, "id": "f6"}]'
    calls = read(MISTRAL, "Look. [TOOL_CALLS]" + body)
    assert [call.id for call in calls.found] == ["a1b2c3d4e", "f6"]
    assert calls.content == "Look."
    assert next(call["id"] for call in wire_calls(calls.found, "c", short_ids=True)) == "a1b2c3d4e"
    for broken in (body[:-1], body + " so", "[]", ""):
        assert read(MISTRAL, "[TOOL_CALLS]" + broken).invalid


def test_named_calls() -> None:
    form = NamedJsonCalls()
    calls = read(form, 'Hm.[TOOL_CALLS]find[ARGS]{"count": 1}[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{}')
    assert calls.found == [Call("find", {"count": 1}), Call("find", {}, "a1b2c3d4e")]
    assert (calls.content, calls.invalid) == ("Hm.", [])
    for broken in ("[TOOL_CALLS]find{}", "[TOOL_CALLS]find[ARGS]{", "find[ARGS]{}", "[TOOL_CALLS][ARGS]{}"):
        assert read(form, broken).invalid
        assert not read(form, broken).found


# ---- XML ------------------------------------------------------------------------------------------------------------


def xml(**values: str) -> str:
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=find>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "42", "42"),
        ("text", "  two\nlines \n", "  two\nlines \n"),
        ("text", "null", "null"),
        ("count", "42", 42),
        ("count", "many", "many"),
        ("share", "0.5", 0.5),
        ("deep", '{"a": [1]}', {"a": [1]}),
        ("many", "[1, 2]", [1, 2]),
        ("yes", "True", True),
        ("yes", "false", False),
        ("maybe", "null", None),
        ("maybe", "7", "7"),
        ("either", "None", None),
        ("either", "7", 7),
        ("pick", "2", 2),
        ("unknown", "7", "7"),
    ],
)
def test_xml_values_are_typed_by_the_schema(name: str, text: str, value: Any) -> None:
    (call,) = read(XmlCalls(), xml(**{name: text})).found
    assert call == Call("find", {name: value})
    assert type(call.arguments[name]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        xml(count="1")[:-12],
        xml(count="1").replace("</function>", ""),
        xml(count="1").replace("</parameter>", ""),
        xml(count="1").replace("<function=find>", "<function=>"),
        xml(count="1").replace("<parameter=count>", "count: "),
        xml(count="1").replace("<tool_call>", ""),
        xml(count="1") + "</function>",
        "<tool_call>find</tool_call>",
        "<function=find><parameter=count>1</parameter></function>",
        "<tool_call><function=find><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=find><parameter=a><parameter=b>1</parameter></function></tool_call>",
    ],
)
def test_xml_calls_that_are_none(text: str) -> None:
    calls = read(XmlCalls(), text)
    assert calls.invalid
    assert not calls.found or text.endswith("</function>")


def test_xml_without_anything_around() -> None:
    calls = read(XmlCalls("", ""), "So: <function=find><parameter=count>1</parameter></function>")
    assert calls.found == [Call("find", {"count": 1})]
    assert (calls.content, calls.invalid) == ("So:", [])
    assert read(XmlCalls("", ""), "<function=find>").invalid


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([HERMES, BARE, MISTRAL, NamedJsonCalls(), XmlCalls(), XmlCalls("", "")]),
    st.lists(
        st.sampled_from(
            [
                *(
                    "<tool_call>",
                    "</tool_call>",
                    "[TOOL_CALLS]",
                    "[ARGS]",
                    "[CALL_ID]",
                    "<function=find>",
                    "</function>",
                ),
                *(
                    "<parameter=count>",
                    "</parameter>",
                    '{"name": "find", ',
                    '"arguments": {}}',
                    '"parameters": {}}',
                    "[",
                ),
                *("]", "{", "}", "7", " ", "\n", "find", "<|python_tag|>", "é"),
            ]
        ),
        max_size=12,
    ).map("".join),
)
def test_any_text_is_read_and_no_call_is_lost(form: ToolCallFormat, text: str) -> None:
    """What has a format's delimiter in it is a call or is reported; it is never an answer."""
    calls = read(form, text)
    if form.looks_like_call(text) and "python_tag" not in form.delimiters[0] and "[CALL_ID]" not in text:
        assert calls.found or calls.invalid
    for call in calls.found:
        assert call.name
        json.dumps(call.arguments)


# ---- found from the template ----------------------------------------------------------------------------------------


def support(source: str) -> Any:
    return find_tool_support(ChatTemplate(tokenizer_for(FAMILIES["tools_json"]), source=source))


def template(call: str) -> str:
    """A template that shows tools as JSON and writes `call` for a call, with `f` its function."""
    return (
        "{{- tools | tojson if tools else '' }}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        "{%- for call in m.tool_calls or [] %}{%- set f = call.function %}" + call + "{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ("""{{- '<tool_call>' + ({'name': f.name, 'arguments': f.arguments} | tojson) + '</tool_call>' }}""", HERMES),
        (
            """{{- '<|tool_call|>' + ([{'name': f.name, 'arguments': f.arguments}] | tojson) + '<|/tool_call|>' }}""",
            JsonCalls(open="<|tool_call|>", close="<|/tool_call|>", listed=True),
        ),
        (
            "{{- '<tools>' + ({'type': 'function', 'function': {'name': f.name, 'parameters': f.arguments}} | tojson)"
            " + '</tools>' }}",
            JsonCalls(open="<tools>", close="</tools>", arguments_key="parameters", nested=True),
        ),
        ("""{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}""", NamedJsonCalls()),
        ("""{{- {'name': f.name, 'parameters': f.arguments} | tojson }}""", BARE),
        (
            "{{- '<function=' + f.name + '>' }}{%- for k, v in f.arguments.items() %}"
            "{{- '<parameter=' + k + '>' + v + '</parameter>' }}{%- endfor %}{{- '</function>' }}",
            XmlCalls("", ""),
        ),
        ("""{{- '<call>' + f.name + '<args>' + ({'name': f.name, 'args': f.arguments} | tojson) }}""", None),
        ("""{{- 'Call ' + f.name + ' with ' + (f.arguments | tojson) }}""", None),
    ],
)
def test_the_format_is_what_the_template_writes(call: str, form: ToolCallFormat | None) -> None:
    found = support(template(call))
    assert found.shown
    assert found.format == form
    assert not found.arguments_as_text


def test_templates_that_want_arguments_as_text_get_text() -> None:
    source = template(
        """{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' + f.arguments + '}</tool_call>' }}"""
    )
    assert support(source).arguments_as_text
    render = Renderer(tokenizer_for(FAMILIES["tools_json"]), chat_template=source)
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {"count": 1}}}
    ids = render.encode_response([user("go")], {"role": "assistant", "content": "", "tool_calls": [call]}, tools=TOOLS)
    assert '"arguments": {"count": 1}}' in render.decode(ids)


def test_templates_that_want_ids_of_nine_characters_get_them() -> None:
    refuse = "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    found = support(template(refuse + """{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}"""))
    assert found.format == NamedJsonCalls(short_ids=True)
    ids = [call["id"] for call in wire_calls([Call("find", {}), Call("find", {})], "call_0", short_ids=True)]
    assert len(set(ids)) == 2
    assert all(len(given) == 9 and given.isalnum() for given in ids)


def test_a_turn_with_a_call_may_end_in_a_token_of_its_own() -> None:
    family = FAMILIES["headers"]
    source = family.source.replace(
        "(function.arguments | tojson) + '}<|eot_id|>'", "(function.arguments | tojson) + '}<|end_of_text|>'"
    )
    assert source != family.source
    render = Renderer(tokenizer_for(family), chat_template=source)
    assert render.terminator == "<|eot_id|>"
    text = '{"name": "find", "parameters": {}}<|end_of_text|>'
    message, ended = render.read(render.encode(text), stop=(), tools=TOOLS, id_prefix="c")
    assert ended
    assert message["tool_calls"]


def test_tokenizers_with_a_template_for_tools_show_them_that() -> None:
    import copy

    tokenizer = copy.copy(tokenizer_for(FAMILIES["tools_json"]))
    tokenizer.chat_template = {"default": FAMILIES["chatml"].source, "tool_use": FAMILIES["tools_json"].source}
    render = Renderer(tokenizer)
    assert '"find"' in render.prompt([user("go")], TOOLS).text
    assert render.template.digest != Renderer(tokenizer, chat_template=FAMILIES["chatml"].source).template.digest


def test_code_that_fails_inside_a_template_is_one_clear_line() -> None:
    from stepgym.errors import UserError

    source = (
        template("{{- 'x' + f.arguments.count }}") + "{{- messages[0].content + 1 if messages | length > 2 else '' }}"
    )
    render = Renderer(tokenizer_for(FAMILIES["tools_json"]), chat_template=source)
    with pytest.raises(UserError, match="fails on the conversation: TypeError") as caught:
        render.prompt([user("a"), user("b"), user("c")])
    assert "\n" not in str(caught.value)


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_calls_of_an_endpoint_are_sorted() -> None:
    def call(arguments: Any, name: Any = "find") -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}

    good = [call('{"a": 1}'), call(""), call({"a": 1})]
    bad = [call("{"), call("[1]"), call("{}", None)]
    valid, invalid = check_wire_calls([*good, *bad])
    assert valid == good
    assert len(invalid) == 3


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["<a>", "</a>", "x<", "é", " "]), st.booleans()), max_size=10),
)
def test_only_sampled_delimiters_are_left_in_the_shadow(pieces: list[tuple[str, bool]]) -> None:
    """Characters stand for tokens here: a delimiter is one id, or is spelled."""
    ids: list[int] = []
    for piece, whole in pieces:
        delimiter = {"<a>": 1, "</a>": 2}.get(piece)
        ids += [delimiter] if whole and delimiter else [ord(c) + 10 for c in piece]
    names = {1: "<a>", 2: "</a>"}

    def decode(some: Any) -> str:
        return "".join(names.get(int(i)) or chr(int(i) - 10) for i in some)

    def encode(text: str) -> Any:
        return np.array([{"<a>": 1, "</a>": 2}[text]] if text in names.values() else [9, 9], dtype=np.int32)

    array = np.array(ids, dtype=np.int32)
    text = decode(array)
    shadow = Delimiters(["<a>", "</a>", "other"], encode, decode).shadow(text, array)
    assert len(shadow) == len(text)
    for token, name in names.items():
        real = [len(decode(array[:place])) for place in range(len(array)) if array[place] == token]
        at, found = shadow.find(name), []
        while at >= 0:
            found.append(at)
            at = shadow.find(name, at + 1)
        assert found == real
