"""The store and its transactions; connections, drivers and statements below them."""

from __future__ import annotations

from celery_durable.store.engine.store import Store, Tx
