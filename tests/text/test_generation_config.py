import pytest

from novalm_jax.errors import CheckpointError
from novalm_jax.text.generation_config import GenerationConfig


def load(write, generation=None, config=None) -> GenerationConfig:
    files = {"generation_config_json": generation, "config_json": config}
    return GenerationConfig.load(write(**{name: value for name, value in files.items() if value is not None}))


def test_without_files_nothing_is_said(write):
    assert load(write) == GenerationConfig()


@pytest.mark.parametrize("value, ids", [(2, (2,)), ([5, 2, 5], (5, 2)), (None, ()), ([], ())])
def test_eos_may_be_an_id_a_list_or_null(write, value, ids):
    assert load(write, {"eos_token_id": value}).eos_token_ids == ids


def test_generation_config_wins_over_config(write):
    assert load(write, {"eos_token_id": [7, 8]}, {"eos_token_id": 2}).eos_token_ids == (7, 8)


def test_config_alone_gives_the_end_ids_and_no_sampling_values(write):
    read = load(write, None, {"eos_token_id": 2, "temperature": 0.3})
    assert read == GenerationConfig(eos_token_ids=(2,))


def test_config_speaks_where_generation_config_says_null(write):
    assert load(write, {"eos_token_id": None}, {"eos_token_id": 2}).eos_token_ids == (2,)


def test_sampling_values_are_read_and_unknown_fields_ignored(write):
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1}
    read = load(write, values | {"do_sample": True, "cache_implementation": "hybrid"})
    assert read.sampling() == values


@pytest.mark.parametrize(
    "fields, temperature",
    [
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({}, None),
        ({"do_sample": None}, None),
    ],
)
def test_do_sample(write, fields, temperature):
    assert load(write, fields).temperature == temperature


@pytest.mark.parametrize(
    "field, value",
    [
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("eos_token_id", -1),
        ("eos_token_id", True),
        ("top_k", -1),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_p", 1.5),
        ("min_p", True),
        ("temperature", 10**400),
        ("repetition_penalty", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 10**400),
        ("eos_token_id", [10**400]),
        ("do_sample", 1),
        ("do_sample", "no"),
    ],
)
def test_wrong_values_name_file_and_field(write, field, value):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {field} is "):
        load(write, {field: value})


def test_fields_that_stand_there_twice(write):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: gives twice: top_k"):
        load(write, '{"top_k": 1, "top_k": 2}')


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_damaged_file(write, content):
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(write, content)


def test_wrong_value_in_config_names_that_file(write):
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id"):
        load(write, {}, {"eos_token_id": {}})
