"""The message builder: makes the messages for due runs and for rows of the outbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.app.routes import Router

from celery_durable.errors import TaskRefused
from celery_durable.model import REFERENCE_HEADER, DueRun, OutboxKind, OutboxMessage, TaskReference
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing.recorder import (
    RecordedMessage,
    Recorder,
    is_publish_observed,
    prevent_result_subscription,
)

# Templates: a dispatch message is recorded once per workflow and queue, and each copy fills in the values that differ.
#
# `send_task` takes 200 to 300 us of CPU for a message; to fill in a template takes a few. The messages are the same.


PLACEHOLDER_PREFIX = "@durable."
ID, ARGS, ROOT, PARENT, REPLY = (f"{PLACEHOLDER_PREFIX}{name}@" for name in ("id", "args", "root", "parent", "reply"))
_INSTANCE_PLACEHOLDER = f"{PLACEHOLDER_PREFIX}instance@"
_MAX_TEMPLATES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A recorded message with placeholders among its headers and properties; its body is split around the arguments."""

    recorded: RecordedMessage
    before: str
    after: str


Record = Callable[[tuple[Any, ...], dict[str, Any]], RecordedMessage]


class Templates:
    """The templates of one process, each made at first use."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._templates: dict[Any, Template | None] = {}
        self._queues: Any = None

    def clear(self) -> None:
        """Drop all templates in a forked child: they contain the parent's pid (`origin`)."""
        self._templates = {}

    def get_or_make(self, queue: str, workflow: str, *, has_parent: bool, record: Record) -> Template | None:
        """The template of these messages; None if the messages differ in more values than a template can fill in."""
        queues = self._app.amqp.queues
        if (
            queues is not self._queues or len(self._templates) > _MAX_TEMPLATES
        ):  # a new task_queues changes the declarations
            self._queues, self._templates = queues, {}
        # The reply queue of the calling thread is in the message too; `fill` fills it in.
        key = (queue, workflow, has_parent)
        if key not in self._templates:
            self._templates[key] = self._make(queue, workflow, has_parent=has_parent, record=record)
        return self._templates[key]

    def fill(
        self, template: Template, args: tuple[str, str, int], *, id: str, root: str, parent: str
    ) -> RecordedMessage:
        recorded = template.recorded
        values = {ID: id, ARGS: repr(args), ROOT: root, PARENT: parent, REPLY: self._app.thread_oid}
        body = f"{template.before}{json.dumps(args)}{template.after}"
        headers, properties = _fill(recorded.headers, values), _fill(recorded.properties, values)
        prepare = (body, *recorded.prepare[1:4], headers, properties)
        return RecordedMessage(prepare, recorded.exchange, recorded.routing_key, recorded.declare)

    def _make(self, queue: str, workflow: str, *, has_parent: bool, record: Record) -> Template | None:
        if PLACEHOLDER_PREFIX in queue or PLACEHOLDER_PREFIX in workflow:
            return None
        args = (workflow, _INSTANCE_PLACEHOLDER, 0)
        ids = {"root_id": ROOT, "parent_id": PARENT} if has_parent else {}
        recorded = record(args, {"task_id": ID, "argsrepr": ARGS, "kwargsrepr": "{}", "reply_to": REPLY, **ids})
        if not isinstance(recorded.body, str):
            return None  # the body is compressed
        parts = recorded.body.split(json.dumps(args))
        if len(parts) != 2 or PLACEHOLDER_PREFIX in "".join(parts):
            return None  # task protocol 1 has the id in its body
        return Template(recorded, *parts)


def _fill(fields: dict[str, Any], values: dict[str, str]) -> dict[str, Any]:
    return {name: values.get(value, value) if type(value) is str else value for name, value in fields.items()}


_MAX_NAME_LENGTH = 240


class MessageBuilder:
    """Makes a task's message, followed by Celery's own events about it; raises any error of the application's code."""

    def __init__(
        self,
        app: Celery,
        runtime: Runtime,
        *,
        advance: str,
        deliver: str,
        answer_task_names: tuple[str, str],
        queue: Callable[[], str],
    ) -> None:
        self._app, self._runtime = app, runtime
        self._advance, self._deliver, self._answer_task_names, self._queue = advance, deliver, answer_task_names, queue
        self.templates = Templates(app)

    def make_dispatch_builder(self, *, supports_templates: bool) -> Callable[[DueRun], Sequence[RecordedMessage]]:
        """A function that makes the dispatch messages of one batch, from templates if the transport supports them."""
        uses_templates = supports_templates and not is_publish_observed(self._app)
        task: Any = self._app.current_worker_task
        ids = (task.request.root_id or task.request.id, task.request.id) if task else ("", "")

        def make(due: DueRun) -> Sequence[RecordedMessage]:
            ref = due.ref
            args = (ref.workflow, ref.instance_id, ref.run_number)
            # Flower and logs show these ids. With the nonce, a revoke of one message does not block the next one.
            # The id is a short string of AMQP, at most 255 bytes.
            id_ = f"{':'.join(map(str, args))[:_MAX_NAME_LENGTH]}:{self._nonce()}"

            def record(args: tuple[Any, ...], options: dict[str, Any]) -> RecordedMessage:
                return self._record_internal(self._advance, args, ref.workflow, due.queue, options)[0]

            if uses_templates:
                has_parent = task is not None
                template = self.templates.get_or_make(due.queue, ref.workflow, has_parent=has_parent, record=record)
                if template is not None:
                    return (self.templates.fill(template, args, id=id_, root=ids[0], parent=ids[1]),)
            options = {"task_id": id_, "argsrepr": repr(args), "kwargsrepr": "{}"}
            return self._record_internal(self._advance, args, ref.workflow, due.queue, options)

        return make

    def build_outbox_messages(self, message: OutboxMessage) -> Sequence[RecordedMessage]:
        """The messages for a row of the outbox; none if the task's ``apply_async`` sent nothing."""
        if message.kind is OutboxKind.EVENT:
            id_ = {"task_id": f"{message.id}:{self._nonce()}"}
            return self._record_internal(self._deliver, (message.id,), message.name, self._queue(), id_)
        prevent_result_subscription(self._app)
        recorder, body = Recorder(), message.content
        ours = {"task_id": message.id, "producer": recorder, "add_to_parent": False}
        options: dict[str, Any] = {**body["options"], **self.build_answer_options(body), **ours}
        task = self._app.tasks.get(message.name)
        if task is None:  # the task belongs to another application, or its module is not imported here
            self._app.send_task(message.name, args=body["args"], kwargs=body["kwargs"], **options)
        else:  # apply_async adds the options of the task's definition
            task.apply_async(body["args"], body["kwargs"], **options)
        if not recorder.messages and "reference" in body:
            raise TaskRefused(message.name, "its apply_async sent no message, so no result would come")
        return recorder.messages

    def build_answer_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The options that make a worker of any application answer when the task has ended; {} if no step waits.

        The header is for a message that is unreadable or whose task is unknown: Celery then calls no callback.
        """
        reference = TaskReference.read(body.get("reference"))
        if reference is None:
            return {}
        queue = self._queue()  # explicit, since the worker may belong to an application with another workflow queue
        raw_reference = reference.with_queue(queue).to_json()
        options = {"queue": queue, "serializer": "json", "priority": 0, "ignore_result": True}
        done, failed = (  # dicts: YAML and other serializers know no class Signature
            dict(self._app.signature(name, args=(raw_reference,), options=options)) for name in self._answer_task_names
        )
        headers = {**(body["options"].get("headers") or {}), REFERENCE_HEADER: raw_reference}
        return {"link": done, "link_error": failed, "headers": headers}

    def _record_internal(
        self, task: str, args: tuple[Any, ...], name: str, queue: str, options: dict[str, Any]
    ) -> list[RecordedMessage]:
        """Record a message to an internal task, without the application's routes and default priority."""
        recorder = Recorder()
        self._app.send_task(
            task,
            args=args,
            queue=queue,
            shadow=f"durable:{name}"[:_MAX_NAME_LENGTH],
            router=Router(queues=self._app.amqp.queues, app=self._app),
            priority=0,
            serializer="json",
            ignore_result=True,
            add_to_parent=False,
            producer=recorder,
            **options,
        )
        return recorder.messages

    def _nonce(self) -> str:
        return self._runtime.new_token()[:8]
