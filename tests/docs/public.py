"""The public surface: the modules that docs/index.md lists, and what they export."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

from tests.docs.blocks import ROOT

_ROW = re.compile(r"^\| `(celery_durable[\w.]*)` \|", re.MULTILINE)
NAMES = _ROW.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))


def documented_modules() -> dict[str, ModuleType]:
    return {name: importlib.import_module(name) for name in NAMES}


def exports(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}
