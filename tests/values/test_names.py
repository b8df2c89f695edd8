from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.errors import InvalidEventType, InvalidInstanceId, InvalidTopic, NameInvalid
from celery_durable.values import (
    check_event_type,
    check_identifier,
    check_instance_id,
    check_text_name,
    check_topic,
    require_text,
    sanitize_text,
)

IDENTIFIERS: list[tuple[Callable[[object, int], str], type[NameInvalid], str]] = [
    (check_instance_id, InvalidInstanceId, "Instance id"),
    (check_event_type, InvalidEventType, "Event type"),
    (lambda value, limit: check_identifier("Workflow name", value, limit), NameInvalid, "Workflow name"),
]


@pytest.mark.parametrize(("check", "error", "what"), IDENTIFIERS)
def test_letters_digits_dashes_and_underscores_make_an_identifier(
    check: Callable[[object, int], str], error: type[NameInvalid], what: str
) -> None:
    for value in ("a", "_", "0", "order-1", "A_b-9", "x" * 100):
        assert check(value, 100) == value


@pytest.mark.parametrize(("check", "error", "what"), IDENTIFIERS)
def test_anything_else_is_no_identifier(
    check: Callable[[object, int], str], error: type[NameInvalid], what: str
) -> None:
    rule = "use 1 to 100 of the characters a-z A-Z 0-9 _ - and do not begin with '-'"
    for value in ("", "-a", "a b", "a.b", "a:b", "order\n", "order\n\n", "\norder", "a\x00", "\xe9", "\uff11"):
        with pytest.raises(error) as refused:
            check(value, 100)
        assert type(refused.value) is error
        assert str(refused.value) == f"{what} {value!r} is not allowed: {rule}."


@pytest.mark.parametrize(
    ("check", "error", "what"),
    [
        *IDENTIFIERS,
        (lambda value, limit: check_text_name("Step name", value, limit), NameInvalid, "Step name"),
        (lambda value, limit: check_topic(value), InvalidTopic, "Topic"),
        (lambda value, limit: require_text("Reason", value), NameInvalid, "Reason"),
    ],
)
def test_what_is_no_text_is_refused_by_its_type(
    check: Callable[[object, int], str], error: type[NameInvalid], what: str
) -> None:
    for value, type_name in ((7, "int"), (None, "NoneType"), (b"a", "bytes"), (["a"], "list")):
        with pytest.raises(error) as refused:
            check(value, 100)
        assert type(refused.value) is error
        assert str(refused.value) == f"{what} {value!r} is not allowed: it is of type {type_name}; pass text (str)."


def test_an_identifier_may_be_exactly_as_long_as_its_limit() -> None:
    assert check_instance_id("x" * 7, 7) == "x" * 7
    with pytest.raises(InvalidInstanceId) as refused:
        check_instance_id("x" * 8, 7)
    assert str(refused.value) == (
        "Instance id 'xxxxxxxx' is not allowed: use 1 to 7 of the characters a-z A-Z 0-9 _ - and do not begin with '-'."
    )


def test_a_long_name_is_shown_by_its_beginning() -> None:
    with pytest.raises(NameInvalid) as refused:
        check_identifier("Workflow name", "x" * 1000, 64)
    assert str(refused.value) == (
        f"Workflow name '{'x' * 116}... is not allowed: "
        "use 1 to 64 of the characters a-z A-Z 0-9 _ - and do not begin with '-'."
    )


@given(st.text(max_size=12))
def test_an_identifier_is_what_the_rule_says_from_end_to_end(value: str) -> None:
    rule = re.compile(r"\A[a-zA-Z0-9_][a-zA-Z0-9_-]{0,9}\Z")
    try:
        assert check_instance_id(value, 10) == value
        assert rule.match(value)
    except InvalidInstanceId:
        assert not rule.match(value)


@pytest.mark.parametrize("value", ["x", "charge card #3", "\xe9\N{GRINNING FACE}", "a > b", " ", "\xa0", "x" * 256])
def test_a_step_name_may_be_any_text(value: str) -> None:
    assert check_text_name("Step name", value, 256) == value


@pytest.mark.parametrize(
    "value",
    ["", "x" * 257, "a\nb", "a\n", "\x00", "\x1f", "\x1b[2J", "\x7f", "\x80", "\x9b2J", "\ud800"],
)
def test_a_step_name_without_length_or_with_control_characters_is_refused(value: object) -> None:
    with pytest.raises(NameInvalid) as refused:
        check_text_name("Step name", value, 256)
    shown = repr(value) if len(repr(value)) <= 120 else repr(value)[:117] + "..."
    assert str(refused.value) == (
        f"Step name {shown} is not allowed: use text of 1 to 256 characters without control characters."
    )


@given(st.characters(categories=["Cc", "Cs"]))
def test_no_control_character_and_no_half_of_a_surrogate_pair_gets_into_a_name(character: str) -> None:
    with pytest.raises(NameInvalid):
        check_text_name("Step name", f"a{character}b", 256)


@given(st.text(alphabet=st.characters(), max_size=40), st.integers(3, 30))
def test_stored_text_is_bounded_encodable_and_without_nul(text: str, limit: int) -> None:
    stored = sanitize_text(text, limit)
    assert len(stored) <= limit
    assert "\x00" not in stored
    stored.encode()
    assert sanitize_text(stored, limit) == stored


def test_stored_text_keeps_what_it_can() -> None:
    assert sanitize_text("plain \xe9 \N{GRINNING FACE}\n", 100) == "plain \xe9 \N{GRINNING FACE}\n"
    assert sanitize_text("a\x00b\ud800c", 100) == "ab\N{REPLACEMENT CHARACTER}c"
    assert sanitize_text("12345678", 8) == "12345678"
    assert sanitize_text("123456789", 8) == "12345..."
