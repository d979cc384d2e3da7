"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novalm_jax.errors import OptionError
from novalm_jax.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("1B", 1),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("500MB", 500 * 10**6),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        (" 2TB ", 2 * 10**12),
        ("1PiB", 2**50),
        ("0.5GiB", 2**29),
        (".5KiB", 512),
        ("1e3", 1000),
        ("1.5e3kb", 1_500_000),
    ],
)
def test_a_text_is_a_size(text, size):
    assert parse_size(text) == size


def test_decimal_and_binary_units_differ():
    assert parse_size("1GB") == 1000**3 != parse_size("1GiB") == 1024**3


@pytest.mark.parametrize(("text", "size"), [("90%", 900), ("0%", 0), ("100%", 1000), ("12.5 %", 125), ("99.99%", 999)])
def test_a_percentage_is_a_part_of_the_total(text, size):
    assert parse_size(text, total=1000) == size


def test_a_part_of_a_byte_is_not_a_byte():
    assert parse_size("33%", total=10) == 3
    assert parse_size("1.9") == 1


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (-1, "negative"),
        ("-1GiB", "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("8 G i B", "not a size"),
        ("8Gb/s", "not a size"),
        ("eight", "not a size"),
        ("auto", "not a size"),
        ("1.2.3", "not a size"),
        ("nan", "not a size"),
        ("50%", "needs a memory"),
        ("1e400", "larger than any memory"),
        ("1e308PB", "larger than any memory"),
        ("9" * 400, "larger than any memory"),
        (True, "expected a size"),
        (1.5, "expected a size"),
        (None, "expected a size"),
    ],
)
def test_what_is_no_size_is_refused_with_the_option_and_an_example(size: Any, says):
    with pytest.raises(OptionError, match=says) as caught:
        parse_size(size, name="device_memory")
    assert str(caught.value).startswith("device_memory: ")


def test_more_than_all_of_the_memory_is_refused():
    with pytest.raises(OptionError, match="at most 100%"):
        parse_size("101%", total=1000)


@given(st.integers(0, 2**50))
def test_a_whole_number_is_exact_in_every_unit(size):
    assert parse_size(size) == parse_size(str(size)) == size
    assert parse_size(f"{size}KiB") == size * 1024


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**60, "1048576.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_a_size_is_written_in_binary_units(size, text):
    assert format_size(size) == text


@given(st.integers(0, 2**50))
def test_what_is_written_can_be_read_again(size):
    written = format_size(size)
    assert abs(parse_size(written) - size) <= max(size * 0.006, 1)
