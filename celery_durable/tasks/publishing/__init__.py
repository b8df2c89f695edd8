"""How messages leave this process: hints of due work, and what steps left in the outbox."""

from celery_durable.tasks.publishing.publisher import Publisher
from celery_durable.tasks.publishing.report import Outage, PublishReport, SendState

__all__ = ["Outage", "PublishReport", "Publisher", "SendState"]
