"""What a pass does before its worker stops."""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery_durable.errors import Superseded
from celery_durable.model import RunRef

logger = logging.getLogger("celery_durable.runner")


def release_for_shutdown(ref: RunRef, release: Callable[[], object]) -> None:
    """Call ``release``, which releases the claim so that another worker continues. Log it if that fails.

    The caller then raises what stops the worker.
    """
    try:
        release()
    except Superseded:
        logger.info("%s was taken over before this worker could release it", ref)
    except Exception as exc:  # noqa: BLE001  # what stops the worker is more important; the lease will expire
        logger.warning("%s could not be released, so its lease will expire: %s", ref, exc)
