"""What tests/conftest.py changes about the whole run."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader

import celery_durable.doctor


def test_pytest_does_not_rewrite_modules_of_celery_durable() -> None:
    assert type(celery_durable.doctor.__loader__) is SourceFileLoader
