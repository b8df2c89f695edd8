"""The page about scale names the indexes that there are."""

from __future__ import annotations

import re
from pathlib import Path

from celery_durable.store.schema.tables import build_tables

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text(encoding="utf-8")


def test_the_page_says_what_each_index_of_instances_is_for() -> None:
    tables = build_tables(None, "")
    named = set(re.findall(r"`(ix_workflow_\w+)`", PAGE))
    assert named >= {str(index.name) for index in tables.instance.indexes}
    assert named <= {str(index.name) for table in tables.metadata.sorted_tables for index in table.indexes}
