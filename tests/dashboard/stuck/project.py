"""``celery -A tests.dashboard.stuck.project``: the shop, at home where the environment says."""

from __future__ import annotations

import os

from tests.dashboard.stuck.shop import build

app = build(
    os.environ["SHOP_BROKER"],
    os.environ["SHOP_DATABASE"],
    is_new=os.environ.get("SHOP_IS_NEW", "1") == "1",
    is_off=os.environ.get("SHOP_IS_OFF") == "1",
)
