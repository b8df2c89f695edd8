"""The oldest versions that the package accepts are tested every night."""

from __future__ import annotations

import re
import tomllib

import noxfile
from tests.docs.blocks import ROOT


def test_the_noxfile_begins_with_the_lowest_versions_that_the_package_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in project["dependencies"])
    assert next(iter(noxfile.CELERY.values())) == f"~={lowest['celery']}.0"
    assert next(iter(noxfile.SQLALCHEMY.values())) == f"~={lowest['sqlalchemy']}"
    assert project["requires-python"] == f">={noxfile.PYTHONS[0]}"
