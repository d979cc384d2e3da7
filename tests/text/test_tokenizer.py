import copy
import json
import re

import pytest
import tokenizers
from tokenizers import AddedToken, models, processors

from novalm_jax.errors import CheckpointError, RequestError
from novalm_jax.text.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN
HELLO = [{"role": "user", "content": "the"}]


def test_vocabulary_and_roles_from_tokenizer_json_alone(byte_fallback, write):
    tokenizer = Tokenizer.load(write(byte_fallback))
    assert tokenizer.vocab_size == byte_fallback.get_vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.token_id("<s>"), tokenizer.token_id("</s>")) == (1, 2)


def test_roles_are_found_whatever_the_vocabulary_holds():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"b": 0, "[": 1, "]": 2}, merges=[]))
    backend.add_special_tokens(["[", "]"])
    backend.post_processor = processors.TemplateProcessing(single="[ $A ]", special_tokens=[("[", 1), ("]", 2)])
    tokenizer = Tokenizer(backend)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("b") == tokenizer.encode("[b") == [1, 0, 2]


def test_a_tokenizer_that_adds_nothing_has_no_roles(byte_level, write):
    tokenizer = Tokenizer.load(write(byte_level))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("file", ["tokenizer_config_json", "special_tokens_map_json"])
def test_roles_from_the_other_files(byte_level, write, file, as_object):
    roles = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    content = {name: {"content": text, "lstrip": False} if as_object else text for name, text in roles.items()}
    tokenizer = Tokenizer.load(write(byte_level, **{file: content}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 3)
    assert (tokenizer.token_id("<|bos|>"), tokenizer.token_id("<|im_end|>")) == (0, 3)


def test_tokenizer_config_wins_and_null_is_silence(byte_level, write):
    folder = write(
        byte_level,
        tokenizer_config_json={"eos_token": "<|im_end|>", "bos_token": None},
        special_tokens_map_json={"eos_token": "<|eos|>", "bos_token": "<|bos|>"},
    )
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.token_id("<|bos|>"), tokenizer.token_id("<|im_end|>"))


def test_a_role_without_an_id_makes_no_new_id(byte_level, write):
    tokenizer = Tokenizer.load(write(byte_level, tokenizer_config_json={"bos_token": "<none>", "add_bos_token": True}))
    assert tokenizer.bos_id is None
    assert tokenizer.vocab_size == byte_level.get_vocab_size()
    assert tokenizer.encode("the") == byte_level.encode("the").ids


def test_stored_padding_and_truncation_are_switched_off(byte_level, write):
    stored = copy.deepcopy(byte_level)
    stored.enable_padding(length=64)
    stored.enable_truncation(max_length=2)
    assert Tokenizer.load(write(stored)).encode("a little girl") == byte_level.encode("a little girl").ids


def test_raw_text_gets_one_bos(byte_fallback):
    tokenizer = Tokenizer(byte_fallback)
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the").count(1) == 1
    assert tokenizer.encode("<s>the") == tokenizer.encode("the")
    assert tokenizer.encode("<s>the", add_special_tokens=False).count(1) == 1
    assert tokenizer.encode("the", add_special_tokens=False).count(1) == 0
    assert tokenizer.encode("") == [1]


def test_bos_written_twice_stays_where_the_tokenizer_adds_none(byte_level):
    tokenizer = Tokenizer(byte_level, config={"bos_token": "<|bos|>"})
    assert tokenizer.encode("<|bos|><|bos|>the")[:2] == [0, 0]


@pytest.mark.parametrize(
    "template, add_bos, in_chat, in_text", [(WITH_BOS, True, 1, 1), (PLAIN, True, 0, 1), (PLAIN, False, 0, 0)]
)
def test_bos_is_never_doubled(byte_fallback, write, template, add_bos, in_chat, in_text):
    config = {"bos_token": "<s>", "add_bos_token": add_bos, "chat_template": template}
    tokenizer = Tokenizer.load(write(byte_fallback, tokenizer_config_json=config))
    assert tokenizer.encode_chat(HELLO).count(1) == in_chat
    assert tokenizer.encode("the").count(1) == in_text


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("stored", ["", "<|bos|>", "<|eos|>", "<|im_start|> <|bos|>"])
def test_flags_that_contradict_tokenizer_json_count(byte_level, add_bos, add_eos, stored):
    backend = copy.deepcopy(byte_level)
    ids = {token: backend.token_to_id(token) for token in ("<|bos|>", "<|eos|>", "<|im_start|>")}
    before = [token for token in stored.split() if token != "<|eos|>"]
    after = ["<|eos|>"] if stored == "<|eos|>" else []
    if stored:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(ids.items())
        )
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": add_bos, "add_eos_token": add_eos}
    encoded = Tokenizer(backend, config=config).encode("the")
    has_bos = "<|bos|>" in before if add_bos is None else add_bos
    has_eos = bool(after) if add_eos is None else add_eos
    assert encoded.count(ids["<|bos|>"]) == has_bos
    assert encoded.count(ids["<|eos|>"]) == (encoded[-1] == ids["<|eos|>"]) == has_eos
    assert encoded.count(ids["<|im_start|>"]) == ("<|im_start|>" in before)


def test_flags_work_for_token_texts_with_template_signs(byte_level):
    backend = copy.deepcopy(byte_level)
    backend.add_special_tokens(["<bos:$A 1>"])
    tokenizer = Tokenizer(backend, config={"bos_token": "<bos:$A 1>", "add_bos_token": True})
    assert tokenizer.encode("the") == [tokenizer.bos_id, *byte_level.encode("the").ids]


def test_tokens_declared_outside_tokenizer_json_are_added(byte_level, write):
    new = byte_level.get_vocab_size()
    declared = {
        "0": {"content": "<|bos|>", "special": True},
        str(new + 1): {"content": "<|tool|>", "special": False},
        str(new): {"content": "<|end|>", "special": True},
    }
    tokenizer = Tokenizer.load(write(byte_level, tokenizer_config_json={"added_tokens_decoder": declared}))
    assert tokenizer.encode("<|end|><|tool|>") == [new, new + 1]
    assert tokenizer.vocab_size == new + 2
    assert tokenizer.decode([new, new + 1]) == "<|tool|>"
    assert tokenizer.is_special(new) and not tokenizer.is_special(new + 1)


def test_a_role_is_special_even_if_tokenizer_json_forgot(byte_level, write):
    stored = copy.deepcopy(byte_level)
    stored.add_tokens([AddedToken("<end>", special=False)])
    tokenizer = Tokenizer.load(write(stored, tokenizer_config_json={"eos_token": "<end>"}))
    assert tokenizer.decode([*tokenizer.encode("the"), tokenizer.eos_id]) == "the"


@pytest.mark.parametrize(
    "declared, message",
    [
        ({"7": {"content": "<|bos|>", "special": True}}, "'<|bos|>' the id 7, tokenizer.json the id 0"),
        ({"9999": {"content": "<far>", "special": True}}, "the id 9999"),
        ({"x": {"content": "<a>"}}, "added_tokens_decoder must map"),
        ({"1": "<a>"}, "added_tokens_decoder must map"),
        (["<a>"], "added_tokens_decoder must map"),
    ],
)
def test_declared_tokens_that_contradict(byte_level, write, declared, message):
    folder = write(byte_level, tokenizer_config_json={"added_tokens_decoder": declared})
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


def test_no_tokenizer_lists_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, tokenizer\.model and \*\.tiktoken"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"version": "1.0", "model": {"type": "Magic"}}'])
def test_damaged_tokenizer_json(write, content):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer that can be read \(.+\)"):
        Tokenizer.load(write(tokenizer_json=content))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_side_files_are_named(byte_level, write, name, content):
    folder = write(byte_level)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_tiktoken_files_are_told_apart(tmp_path, name):
    (tmp_path / name).write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a tiktoken vocabulary.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_other_tokenizer_files_get_a_way_out(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"only vocab\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_text_that_is_not_unicode(byte_level, text):
    with pytest.raises(RequestError, match=r"valid Unicode: whole characters, no lone surrogates\.$"):
        Tokenizer(byte_level).encode(text)


SMALL_FILES = [
    *("tokenizer.json", "tokenizer.model", "x.tiktoken", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "chat_templates/rag.jinja"),
]


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        ("nowhere", "is a link to a file that is not there"),
        ("loop", "cannot be read: .*symbolic links"),
        ("folder", "is not a file"),
    ],
)
@pytest.mark.parametrize("name", SMALL_FILES)
def test_what_stands_in_place_of_a_file_is_not_taken_for_its_absence(byte_level, write, name, stand_in, says):
    folder = write(None if name in SMALL_FILES[:3] else byte_level)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if stand_in == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if stand_in == "loop" else "nowhere")
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}: {says}"):
        Tokenizer.load(folder)


def test_token_bytes(byte_level, byte_fallback):
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode("日 the😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "日 the😀".encode()
    assert tokenizer.token_bytes(10**12) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert Tokenizer(byte_fallback).token_bytes(byte_fallback.token_to_id("▁the")) == b" the"


def test_chat_sees_special_tokens_and_variables(byte_level, write):
    config = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|eos|>"},
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ additional_special_tokens[0] }}"
        "{{ unk_token }}{{ mood }}{{ add_generation_prompt }}",
    }
    tokenizer = Tokenizer.load(write(byte_level, tokenizer_config_json=config))
    expected = "<|bos|><|eos|><|im_start|>gladFalse"
    assert tokenizer.render_chat(HELLO, mood="glad", add_generation_prompt=False) == expected
    assert tokenizer.encode_chat(HELLO, mood="glad", add_generation_prompt=False)[:3] == [0, 1, 2]
    assert tokenizer.render_chat(HELLO, bos_token="", mood="", chat_template="{{ bos_token }}x") == "x"


def test_the_files_are_left_as_they_were(byte_fallback, write):
    folder = write(byte_fallback, tokenizer_config_json={"bos_token": "<s>", "add_bos_token": False})
    before = json.loads((folder / "tokenizer.json").read_text())
    Tokenizer.load(folder)
    assert json.loads((folder / "tokenizer.json").read_text()) == before
