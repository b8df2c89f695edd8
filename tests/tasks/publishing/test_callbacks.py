"""A hint is published while Celery publishes the callback of a task: an answer wakes its instance there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tasks.publishing.conftest import Line


def test_a_hint_leaves_inside_the_publishing_of_a_callback(make_line: Callable[..., Line], broker: str) -> None:
    line = make_line(broker)
    retry_publish: Any = getattr(line.app.amqp, "_retry_publish", None)
    if retry_publish is None:
        pytest.skip("NOT TESTED: this Celery does not retry the publishing of callbacks by itself")
    assert retry_publish(line.publish)[0] == ["sent"]
    assert len(line.taken("ok")) == 1
