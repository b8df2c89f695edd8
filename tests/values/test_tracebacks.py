"""The text of a traceback as it is stored, and the place in the author's code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_durable.model import NO_TRACE, ErrorTrace
from celery_durable.values import encode, shorten_middle, trace_error
from celery_durable.values.tracebacks import MAX_TRACEBACK_BYTES
from tests.support.three_frames import FILE, LINE, charge

HERE = __file__


def caught(call: Any, *args: Any) -> BaseException:
    try:
        call(*args)
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def test_the_place_is_the_innermost_frame_of_the_author() -> None:
    trace = trace_error(caught(json.loads, "{"))
    assert trace.file == HERE  # not json/decoder.py
    assert trace.text is not None
    assert "json/decoder.py" in trace.text
    assert (trace_error(caught(charge, {})).file, trace_error(caught(charge, {})).line) == (FILE, LINE)


def test_frames_of_libraries_are_left_out_if_only_the_authors_are_wanted() -> None:
    trace = trace_error(caught(json.loads, "{"), "author")
    assert trace.text is not None
    assert "json/decoder.py" not in trace.text
    assert trace.text.splitlines()[-2:] == [
        "  ... 3 frames of libraries",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


def test_frames_of_celery_durable_are_one_line_after_those_of_the_author() -> None:
    trace = trace_error(caught(lambda: encode(object(), what="Result", limits=None)))  # type: ignore[arg-type]
    assert trace.text is not None
    lines = trace.text.splitlines()
    assert "celery_durable/" not in "".join(lines[:-1])
    assert lines[-2].endswith("of celery_durable")
    assert trace.file == HERE


def test_an_exception_that_nothing_raised_has_no_place() -> None:
    assert trace_error(ValueError("no")) == ErrorTrace("ValueError: no\n")


def test_none_leaves_only_the_place() -> None:
    assert trace_error(caught(charge, {}), "none") == ErrorTrace(None, FILE, LINE)


def fail_again() -> None:
    try:
        charge({})
    except KeyError as error:
        raise ValueError("no total") from error


def fail_while_handling() -> None:
    try:
        charge({})
    except KeyError:
        raise ValueError("no total")  # noqa: B904  # this is the case


@pytest.mark.parametrize(
    ("fail", "link"),
    [
        (fail_again, "The above exception was the direct cause of the following exception:"),
        (fail_while_handling, "During handling of the above exception, the following exception occurred:"),
    ],
)
def test_the_causes_come_first_as_python_prints_them(fail: Any, link: str) -> None:
    trace = trace_error(caught(fail))
    assert trace.text is not None
    first, second = trace.text.split(f"\n{link}\n\n")
    assert first.splitlines()[-1] == "KeyError: 'total'"
    assert second.splitlines()[-1] == "ValueError: no total"
    assert trace.file == HERE  # that of the exception itself


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert (trace_error(one).text or "").count("ValueError") == 2


def test_a_long_chain_is_cut() -> None:
    error: BaseException = ValueError("first")
    for number in range(1000):
        new = ValueError(number)
        new.__cause__, error = error, new
    assert (trace_error(error).text or "").count("ValueError") == 20


def test_a_group_has_its_members_and_notes_are_kept() -> None:
    error = ExceptionGroup("two of them", [caught(charge, {}), ValueError("b")])  # type: ignore[list-item]
    error.add_note("look at the invoice")
    text = trace_error(error).text or ""
    assert "  Member 1 of 2:" in text
    assert "    KeyError: 'total'" in text
    assert text.splitlines()[-2:] == ["ExceptionGroup: two of them (2 sub-exceptions)", "look at the invoice"]


def test_messages_and_notes_are_redacted_also_those_of_causes() -> None:
    error = caught(fail_again)
    error.add_note("total: 5")
    text = trace_error(error, redact=lambda message: message.replace("total", "xxxxx")).text or ""
    lines = text.splitlines()
    assert "KeyError: 'xxxxx'" in lines
    assert lines[-2:] == ["ValueError: no xxxxx", "xxxxx: 5"]


class Sly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_has_a_traceback() -> None:
    text = trace_error(Sly()).text or ""
    assert text.endswith("Sly: (its __str__ raised RuntimeError)\n")


def test_what_cannot_be_described_has_no_traceback_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def redact(message: str) -> str:
        raise OSError("the hook is away")

    assert trace_error(ValueError("no"), redact=redact) == NO_TRACE
    assert caplog.messages == ["The traceback of ValueError cannot be recorded"]


def recurse(depth: int) -> None:
    recurse(depth + 1)


def test_a_deep_recursion_is_short() -> None:
    text = trace_error(caught(recurse, 0)).text or ""
    assert len(text) < 2_000
    assert "[Previous line repeated" in text


def test_a_long_text_loses_its_middle() -> None:
    text = "begin\n" + "ä" * 40_000 + "\nend"
    short = shorten_middle(text)
    assert len(short.encode()) <= MAX_TRACEBACK_BYTES
    assert short.startswith("begin\nä")
    assert short.endswith("ä\nend")
    assert "bytes or more are left out" in short
    assert shorten_middle("short") == "short"


def test_text_that_databases_refuse_is_cleaned() -> None:
    assert shorten_middle("a\x00b\ud800c") == "ab\N{REPLACEMENT CHARACTER}c"
