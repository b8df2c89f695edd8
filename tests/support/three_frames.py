"""A body that fails three frames deep, and where. Everything that shows a failed run has to show that place."""

from __future__ import annotations

import inspect
from typing import Any

FILE = __file__


def charge(order: dict[str, Any]) -> int:
    secret = "4242 4242 4242 4242"
    return price(order) + len(secret)


def price(order: dict[str, Any]) -> int:
    return look_up(order)


def look_up(order: dict[str, Any]) -> int:
    return order["total"]


LINE = inspect.getsourcelines(look_up)[1] + 1
"""The line that raises KeyError('total')."""
PLACE = f"{FILE}:{LINE}"
