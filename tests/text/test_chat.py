import copy
import datetime
import enum
from types import SimpleNamespace

import pytest

from novalm_jax.errors import CheckpointError, RequestError
from novalm_jax.text.chat import ChatTemplates

TEXT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LISTS = "{% for m in messages %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}"
    "{% else %}{% for part in content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}({{ part.text }}){% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def render(template, messages=CHAT, **options) -> str:
    return ChatTemplates({"default": template}).render(messages, **options)


def parts(*texts):
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_messages_and_generation_prompt():
    assert render(TEXT) == "[system]Be kind.[user]Hi[assistant]"
    assert render(TEXT, add_generation_prompt=False) == "[system]Be kind.[user]Hi"


@pytest.mark.parametrize("template", [TEXT, BOTH, MACRO])
def test_one_text_part_renders_as_the_text(template):
    assert render(template, parts("Hi")) == render(template, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "template, text", [(TEXT, "[user]a\nb[assistant]"), (BOTH, "(a)(b)"), (MACRO, "(a)(b)"), (LISTS, "(a)(b)")]
)
def test_several_parts_are_joined_by_the_template_if_it_can(template, text):
    assert render(template, parts("a", "b")) == text


@pytest.mark.parametrize("template, text", [(LISTS, "(Hi)"), (FIRST_PART, "Hi")])
def test_a_template_for_lists_only_gets_lists(template, text):
    assert render(template, [{"role": "user", "content": "Hi"}]) == text


def test_splitting_a_text_is_not_reading_a_list():
    template = "{% for m in messages %}{% for word in m.content.split() %}<{{ word }}>{% endfor %}{% endfor %}"
    assert render(template, parts("a b")) == "<a><b>"


def test_content_that_is_none_is_absent():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    template = "{% set m = messages[0] %}{{ m.content }}{{ m.content is defined }} {{ m.tool_calls[0].function.name }}"
    assert render(template, messages) == "False f"


def test_tool_arguments_written_as_text_become_objects():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', {"b": 2}, "{broken")]
    messages = [{"role": "assistant", "tool_calls": calls}]
    before = copy.deepcopy(messages)
    assert render(template, messages) == '{"a": 1};{"b": 2};"{broken";'
    assert messages == before


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_of_its_names(name):
    assert render("{{ messages[0].reasoning_content }}", [{"role": "assistant", name: "hm"}]) == "hm"


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages must be a list"),
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        ([*CHAT, "x"], r"messages\[2\] must be an object .* not str"),
        ([*CHAT, {"content": "x"}], r"messages\[2\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a text or a list of parts, not int"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\]\.content\[0\] must be an object with a type"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] is of type 'text' and must"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[1\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra holds a object"),
    ],
)
def test_messages_of_another_form_are_named(messages, message):
    with pytest.raises(RequestError, match=message):
        render(TEXT, messages)


def test_tools_and_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "<f>", "description": "日本"}}]
    assert render("{{ tools | tojson }}", tools=tools) == (
        '[{"type": "function", "function": {"name": "<f>", "description": "日本"}}]'
    )
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{{ tools is none }}", tools=[]) == "True"
    assert render(TEXT, tools=tools) == render(TEXT)
    assert render("{{ thinking }}", variables={"thinking": True}) == "True"
    with pytest.raises(RequestError, match="tools must be"):
        render(TEXT, tools=["f"])


def test_helpers_of_the_field():
    assert render("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  1\n ],\n "b": 1\n}'
    assert render("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + n) for n in (-1, 0, 1)}
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("x{% generation %}y{% endgeneration %}z") == "xyz"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% if %}", "not valid Jinja, line 1"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent=nothing) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_does_wrong_is_an_error_of_the_request(template, message):
    with pytest.raises(RequestError, match=message):
        render(template)


def test_objects_reach_templates_as_plain_data_only():
    class Role(str, enum.Enum):  # noqa: UP042 - str() of such a member is not its value
        USER = "user"

    assert render(TEXT, [{"role": Role.USER, "content": "x"}]) == "[user]x[assistant]"
    with pytest.raises(RequestError, match="secret holds a SimpleNamespace"):
        render("{{ secret }}", variables={"secret": SimpleNamespace(a=1)})


def load(write, **files):
    config = files.pop("config", {})
    return ChatTemplates.load(write(**files), config)


def test_templates_from_tokenizer_config(write):
    assert load(write, config={"chat_template": "A"}).texts == {"default": "A"}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    templates = load(write, config={"chat_template": named})
    assert templates.choose() == "A"
    assert templates.choose(with_tools=True) == "T"
    assert templates.choose("tool_use") == "T"
    assert templates.choose("{{ x }}", with_tools=True) == "{{ x }}"


def test_a_jinja_file_wins_over_everything(write):
    files = {"chat_template_jinja": "file", "chat_template_json": {"chat_template": "legacy"}}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    templates = load(write, **files, config={"chat_template": named})
    assert templates.choose(with_tools=True) == "file"


@pytest.mark.parametrize("place", ["chat_templates", "additional_chat_templates"])
def test_named_jinja_files(write, place):
    folder = write(chat_template_jinja="main")
    (folder / place).mkdir()
    (folder / place / "tool_use.jinja").write_text("T")
    templates = ChatTemplates.load(folder, {})
    assert templates.texts == {"default": "main", "tool_use": "T"}


def test_the_old_file_is_used_last(write):
    files = {"chat_template_json": {"chat_template": "legacy"}}
    assert load(write, **files).choose() == "legacy"
    assert load(write, **files, config={"chat_template": "A"}).choose() == "A"


def test_no_template_says_that_completion_works(write):
    with pytest.raises(RequestError, match=r"no chat template .*completion of a prompt works"):
        load(write).render(CHAT)


def test_a_choice_that_does_not_exist(write):
    templates = load(write, config={"chat_template": [{"name": "rag", "template": "R"}]})
    with pytest.raises(RequestError, match=r"no default chat template.*rag"):
        templates.choose()
    with pytest.raises(RequestError, match=r"'other' is neither .*rag"):
        templates.choose("other")
    for other in (5, b"rag", ["rag"]):
        with pytest.raises(RequestError, match="chat_template must be a text, not "):
            templates.choose(other)


@pytest.mark.parametrize("stored", [3, [{"name": "default"}], {"default": "A"}])
def test_templates_of_another_form(write, stored):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be"):
        load(write, config={"chat_template": stored})
