"""Databases for the example shops."""

from __future__ import annotations

import shutil
from pathlib import Path

import sqlalchemy as sa


def make_shop_database(template: str, folder: Path, tables: sa.MetaData) -> str:
    """Copy a migrated SQLite file, add the shop's own tables, and return its URL."""
    shutil.copy(template, folder / "shop.sqlite3")
    url = f"sqlite:///{folder}/shop.sqlite3"
    engine = sa.create_engine(url)
    tables.create_all(engine)
    engine.dispose()
    return url
