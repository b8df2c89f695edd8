"""Connections of our own that publish: Redis and RabbitMQ many messages at a time, any other one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable

from celery import Celery

from celery_durable.tasks.publishing.transports.amqp import AmqpTransport
from celery_durable.tasks.publishing.transports.generic import Transport
from celery_durable.tasks.publishing.transports.redis import RedisTransport


def transport_kind(app: Celery) -> type[Transport]:
    """What fits the application's broker, with this kombu: its private names may be missing in another version."""
    transport = app.connection_for_write().transport
    kinds: tuple[type[Transport], ...] = (RedisTransport, AmqpTransport)
    return next((kind for kind in kinds if kind.fits(transport)), Transport)


def maker(app: Celery, kind: type[Transport], monotonic: Callable[[], float]) -> Callable[[int], Transport]:
    """Makes a connection that is not open yet, for the ``turn``-th time."""
    return functools.partial(kind, app, monotonic)


__all__ = ["Transport", "maker", "transport_kind"]
