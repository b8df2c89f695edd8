"""Checks of labels, by which instances can be searched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from celery_durable.errors import InvalidLabel, TooManyLabels
from celery_durable.values.names import MAX_ID_LENGTH, check_identifier_as, check_text_name

MAX_LABEL_NAME_LENGTH = 64
MAX_LABELS = 16
"""The largest number of labels of one instance."""


def check_labels(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return a checked copy, empty for None. Raises InvalidLabel, TooManyLabels."""
    return check_label_count({name: check_label_value(name, value) for name, value in _check_names(given).items()})


def check_label_changes(given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return a checked copy. A value of None removes the label. Raises InvalidLabel."""
    return {
        name: None if value is None else check_label_value(name, value) for name, value in _check_names(given).items()
    }


def check_label_count(found: dict[str, str]) -> dict[str, str]:
    """Return the labels unchanged. Raises TooManyLabels if one instance may not have so many."""
    if len(found) > MAX_LABELS:
        raise TooManyLabels(len(found), MAX_LABELS)
    return found


def parse_labels(words: Iterable[str]) -> dict[str, str]:
    """Return labels from texts like ``name=value``. Raises InvalidLabel, also for a repeated name; TooManyLabels."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in found:
            raise InvalidLabel("Label", word, "write it as name=value, each name once")
        found[name] = value
    return check_labels(found)


def _check_names(given: Mapping[str, object] | None) -> dict[str, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidLabel("A set of labels like", given, "pass a mapping of names to values")
    return {check_label_name(name): value for name, value in given.items()}


def check_label_name(value: object) -> str:
    """Return the valid name of a label. Raises InvalidLabel."""
    return check_identifier_as(InvalidLabel, "Label name", value, MAX_LABEL_NAME_LENGTH)


def check_label_value(name: str, value: object) -> str:
    """Return the valid value of a label. Raises InvalidLabel."""
    return check_text_name(f"Label {name!r} with the value", value, MAX_ID_LENGTH, InvalidLabel)
