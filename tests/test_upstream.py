"""Workarounds for other projects end with the versions that need them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.version import Version

import celery_durable.app  # noqa: F401  # the code of a worker
from celery_durable.upstream import repairs

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_no_workaround_stays_for_a_version_that_is_no_longer_supported() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    lowest = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", "\n".join(dependencies), re.MULTILINE))
    assert repairs
    assert [each.code for each in repairs if Version(lowest[each.project]) >= Version(each.version)] == []
