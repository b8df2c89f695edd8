"""The group commit of a process whose commits are all in groups."""

from __future__ import annotations

from celery_durable.runner.group_commit import GroupCommit
from celery_durable.store.engine import Store


class AlwaysInGroups(GroupCommit):
    """The group commit of a process in which another pass commits all the time."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._is_one_alone = True
