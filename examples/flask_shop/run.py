"""The applications of the shop, for `celery -A examples.flask_shop.run`."""

from __future__ import annotations

from examples.flask_shop import create_app

site = create_app()
celery = site.extensions["celery"]
