"""A runtime that dies at a checkpoint, or has its connection cut, when a file says so."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, signals

from celery_durable.runtime import Runtime
from tests.smoke.config import Config

_role = ""


class Treacherous(Runtime):
    """Dies at a checkpoint, or has its connection cut, when a file ``orders/<role>.<what>`` says so; each once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._is_after_body = False

    def checkpoint(self, name: str) -> None:
        role = _role or self._config.role
        if role == "child" and threading.current_thread() is not threading.main_thread():
            return  # the keeper's renewals are no boundaries
        if name == "after-body":
            self._is_after_body = True
        if name in ("before-commit", "after-commit") and role == "child" and not self._is_after_body:
            return
        if name == "before-commit":
            for cut in ("cut-before", "cut-after"):
                if self._is_ordered(role, cut):
                    self._have_cut(cut)
        if self._is_ordered(role, f"hang.{name}"):
            threading.Event().wait()
        if self._is_ordered(role, name):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "after-commit":
            self._is_after_body = False

    def _is_ordered(self, role: str, what: str) -> bool:
        order = self._config.path("orders", f"{role}.{what}")
        try:
            order.rename(self._config.path("done", order.name))
        except FileNotFoundError:
            return False
        return True

    def _have_cut(self, how: str) -> None:
        with socket.create_connection(("127.0.0.1", self._config.control_port), timeout=10) as control:
            control.sendall(how.encode())
            assert control.recv(2) == b"ok"


def make_app(build: Callable[[Config], Celery]) -> Celery:
    """The application of this process, at home where its environment says."""
    config = Config.read(os.environ)
    app = build(config)
    app.set_current()
    if config.role == "worker":
        signals.worker_process_init.connect(become_child)
    return app


def become_child(**_: Any) -> None:
    """What a pool's process does first, so that it dies of other orders than its parent."""
    global _role
    _role = "child"
