"""Support sessions, as a package of its own: tables, a workflow, and an API that knows nothing of Celery.

The application registers `required_workflows` and hands `Sessions` its `durable.service`.
"""

from examples.package_with_workflows.sessions.sessions import Sessions
from examples.package_with_workflows.sessions.tables import metadata
from examples.package_with_workflows.sessions.workflows import required_workflows

__all__ = ["Sessions", "metadata", "required_workflows"]
