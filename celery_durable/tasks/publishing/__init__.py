"""Publishing: sends the dispatch messages for due runs and the messages of the outbox."""

from celery_durable.tasks.publishing.publisher import Publisher
from celery_durable.tasks.publishing.report import BrokerOutage, PublishReport, SendState
