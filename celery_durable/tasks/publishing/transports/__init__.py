"""Transports: internal connections that publish; Redis and RabbitMQ get many messages at a time, others one by one."""

from __future__ import annotations

from celery import Celery

from celery_durable.tasks.publishing.transports.amqp import AmqpTransport
from celery_durable.tasks.publishing.transports.generic import Transport
from celery_durable.tasks.publishing.transports.redis import RedisTransport


def find_transport_class(app: Celery) -> type[Transport]:
    """The transport class for the application's broker.

    `Transport` is the fallback if this kombu lacks the private names that the others use, or if ``broker_url`` cannot
    be used: then no message can be built, and the log has the error.
    """
    try:
        transport = app.connection_for_write().transport
    except Exception:  # noqa: BLE001  # what the import of a transport raises
        return Transport
    kinds: tuple[type[Transport], ...] = (RedisTransport, AmqpTransport)
    return next((kind for kind in kinds if kind.supports(transport)), Transport)
