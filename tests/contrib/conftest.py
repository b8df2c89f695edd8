"""Celery apps as those of the Celery tests."""

from tests.celery.conftest import _leave_logging_alone, app, durable, make_app

__all__ = ["_leave_logging_alone", "app", "durable", "make_app"]
