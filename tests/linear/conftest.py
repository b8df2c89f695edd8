from __future__ import annotations

from tests.support.databases import on_databases

database = on_databases("sqlite")
