"""The instances in Django's admin: a list, one page for each instance, and actions with a permission each.

Its operations are those of the HTTP API: bounded reads (LAW 10), `redact`. Nothing can be edited but by the actions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from celery_durable import commands, values
from celery_durable.all_operations import Operations
from celery_durable.app.internals import Internals
from celery_durable.commands import Target
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.models import Instance, join_key, split_key
from celery_durable.errors import DurableError, InstanceNotFound
from celery_durable.insight.explain import YOUR_APP, Diagnosis, explain
from celery_durable.model import AttemptRecord, HistoryPage, InstanceRow, InstanceSummary, Status, StepRecord
from celery_durable.operations.context import read_status
from celery_durable.wire.requests import Cancel, Reason, Retry, SendEvent, Terminate

# What the pages of Django's admin show. Values have passed the `redact` hook, and each read is bounded (LAW 10).


_ROWS = 50
_HISTORY_ROWS = 25
_MAX_SHOWN = 2000
_MAX_RUNS = 20

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The filter and the position of a list, as its address has them."""

    workflow: str = ""
    status: str = ""
    text: str = ""
    cursor: str = ""

    @classmethod
    def read(cls, query: Query) -> ListQuery:
        """Read the query of an address."""
        text = query.get("q", "").strip()
        return cls(query.get("workflow", ""), query.get("status", ""), text, query.get("cursor", ""))

    def to_address(self, **changes: str) -> str:
        """Return the address of the same list with these changes, from its first row unless a cursor is given."""
        changed = dataclasses.replace(self, **({"cursor": ""} | changes))
        pairs = {
            "workflow": changed.workflow, "status": changed.status, "q": changed.text, "cursor": changed.cursor,
        }  # fmt: skip
        return "?" + urlencode({name: value for name, value in pairs.items() if value})

    @property
    def labels(self) -> dict[str, str] | None:
        """The labels of a search such as ``tenant=acme region=eu``; None if it is not one."""
        words = self.text.split()
        if not all("=" in word[1:] for word in words):
            return None
        return dict(word.split("=", 1) for word in words)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a filter, with its address."""

    label: str
    address: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Row:
    """An instance of the list. ``key``: its key in the admin; ``address``: the key as a part of an address."""

    key: str
    address: str
    summary: InstanceSummary

    @classmethod
    def make(cls, internals: Internals, found: InstanceSummary) -> Row:
        """Return the row of an instance, redacted."""
        key = join_key(found.workflow, found.id)
        return cls(key, quote(key), internals.redaction(found.workflow, found.id).redact_summary(found))


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of the list."""

    query: ListQuery
    rows: Sequence[Row]
    total: str
    next_address: str | None
    filters: Sequence[tuple[str, Sequence[Choice]]]

    @property
    def first_address(self) -> str:
        """The address of the first page of this list."""
        return self.query.to_address()

    @classmethod
    def read(cls, internals: Internals, query: ListQuery) -> ListPage:
        """Read a page; raises a DurableError if the status, the search or the cursor cannot be used."""
        status = read_status(query.status) if query.status else None
        labels = query.labels
        if labels is None:
            found = _find_by_id(internals, query)
            return cls._make(internals, query, found, str(len(found)), None)
        chosen: dict[str, Any] = {"status": status, "labels": values.check_labels(labels)}
        queries = internals.operations.queries
        page = queries.list(query.workflow or None, cursor=query.cursor or None, limit=_ROWS, **chosen)
        count = queries.count(query.workflow or None, **chosen)
        more = None if page.cursor is None else query.to_address(cursor=page.cursor)
        return cls._make(internals, query, page.items, str(count), more)

    @classmethod
    def make_empty(cls, internals: Internals, query: ListQuery) -> ListPage:
        """Return a page without rows."""
        return cls._make(internals, query, (), "0", None)

    @classmethod
    def _make(
        cls,
        internals: Internals,
        query: ListQuery,
        found: Sequence[InstanceSummary],
        total: str,
        next_address: str | None,
    ) -> ListPage:
        names = sorted({*internals.registry, query.workflow} - {""})
        filters = [
            ("status", _make_choices(query, "status", [each.value for each in Status])),
            ("workflow", _make_choices(query, "workflow", names)),
        ]
        return cls(query, [Row.make(internals, each) for each in found], total, next_address, filters)


def _make_choices(query: ListQuery, name: str, options: Sequence[str]) -> list[Choice]:
    chosen = getattr(query, name)
    return [Choice(option or "All", query.to_address(**{name: option}), option == chosen) for option in ("", *options)]


def _find_by_id(internals: Internals, query: ListQuery) -> Sequence[InstanceSummary]:
    """Return the instances whose id is the text of the search, or the one that it names with its workflow."""
    workflow, instance_id = split_key(query.text)
    names = [workflow or query.workflow] if workflow or query.workflow else sorted(internals.registry)
    found = internals.operations.queries.find(instance_id, names)
    return [each for each in found if not query.status or each.status == query.status]


@dataclass(frozen=True, slots=True)
class InstancePage:
    """The page of an instance: why it is where it is, and a page of what happened in one of its runs."""

    row: InstanceRow
    diagnosis: Diagnosis
    commands: Sequence[str]
    history: HistoryPage
    params: str
    output: str | None
    steps: Sequence[tuple[StepRecord, str | None]]
    events: Sequence[tuple[Any, str | None]]
    logs: Sequence[tuple[Any, str | None]]
    attempts: Sequence[AttemptRecord]
    older: Mapping[str, str]
    """The addresses that continue the lists, by their names."""
    runs: Sequence[int]

    @classmethod
    def read(cls, internals: Internals, workflow: str, instance_id: str, query: Query) -> InstancePage:
        """Read the page; raises InstanceNotFound, and RunNotFound or CursorInvalid for a query that cannot be used."""
        redaction = internals.redaction(workflow, instance_id)
        facts = internals.operations.queries.facts(workflow, instance_id)
        diagnosis = explain(facts.redacted(redaction))
        run = query.get("run", "")
        history = redaction.redact_page(
            internals.operations.history.page(
                workflow,
                instance_id,
                run=int(run) if run.isdecimal() else None,
                head=facts.head,
                limit=_HISTORY_ROWS,
                steps_cursor=query.get("steps") or None,
                events_cursor=query.get("events") or None,
                logs_cursor=query.get("logs") or None,
                attempts_cursor=query.get("attempts") or None,
                with_logs=True,
                with_attempts=True,
                with_audit=True,
            )
        )
        assert history.logs is not None
        assert history.attempts is not None
        status, newest = history.status, facts.instance.run_number
        lists = {
            "steps": history.steps, "attempts": history.attempts, "events": history.events, "logs": history.logs,
        }  # fmt: skip
        return cls(
            row=facts.instance,
            diagnosis=diagnosis,
            commands=[_name_program(each, wiring.find_app().main) for each in diagnosis.actions],
            history=history,
            params=_format(history.params) or "null",
            output=(_format(status.output) or "null") if status.status is Status.COMPLETE else None,
            steps=[(each, _format(each.result)) for each in history.steps.items],
            events=[(each, _format(each.payload)) for each in history.events.items],
            logs=[(each, _format(each.data)) for each in history.logs.items],
            attempts=history.attempts.items,
            older={
                name: "?" + urlencode({"run": history.run_number, name: page.cursor})
                for name, page in lists.items()
                if page.cursor is not None
            },
            runs=range(newest, max(newest - _MAX_RUNS, 0), -1),
        )


def _name_program(command: str, app: str | None) -> str:
    command = command.replace(f"celery -A {YOUR_APP} durable", "python manage.py durable")
    return command.replace(YOUR_APP, app or YOUR_APP)


def _format(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ... ({len(text)} characters)"


# What users of Django's admin can do to instances. Each action requires a permission of the app ``celery_durable``.


Form = Mapping[str, str]
_MAX_REASON = 1000
"""Characters of a reason, as in the forms. A longer one would cut off the name of the user."""


class FormInvalid(Exception):
    """A field of the form has a value that cannot be used."""


class NothingChanged(Exception):
    """The action has changed nothing. The message says why."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action: ``run`` does it for the user of this name and returns what has happened, or raises NothingChanged.

    ``is_possible``: whether an instance's page offers it; ``is_for_many``: the list, too. ``is_confirmed``: it asks
    first.
    """

    name: str
    label: str
    permission: str
    is_possible: Callable[[InstanceRow], bool]
    run: Callable[[Operations, Target, Form, str], str]
    is_for_many: bool = True
    is_confirmed: bool = False
    takes_reason: bool = False

    def describe(self, done: str, form: Form) -> str:
        """Return the text for Django's log of changes. ``done`` is what has happened."""
        details = form.get("type", "") if self.name == "send_event" else form.get("reason", "")
        return f"{done.capitalize()}: {details}" if details else f"{done.capitalize()}."


def _pause(operations: Operations, target: Target, _: Form, __: str) -> str:
    before = operations.lifecycle.pause(target.workflow, target.instance_id)
    if before.status is Status.PAUSED:
        raise NothingChanged("It was paused before, so nothing has changed.")
    if before.pause_requested:
        raise NothingChanged("A pause was requested before, so nothing has changed.")
    return "paused" if before.claim_token is None else "will pause when the running step ends"


def _resume(operations: Operations, target: Target, _: Form, __: str) -> str:
    before = operations.lifecycle.resume(target.workflow, target.instance_id)
    if before.status is Status.PAUSED:
        return "resumed"
    if before.pause_requested:
        return "requested pause cancelled"
    raise NothingChanged("It was not paused, so nothing has changed.")


def _retry(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.retry.run(operations, target, Retry(reason=_reason(form, username).reason))
    return "retried"


def _restart(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.restart.run(operations, target, _reason(form, username))
    return "restarted"


def _cancel(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.cancel.run(operations, target, Cancel(reason=_read_reason(form), by=username))
    return "cancelled"


def _terminate(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.terminate.run(operations, target, Terminate(reason=_read_reason(form), by=username))
    return "terminated"


def _reason(form: Form, username: str) -> Reason:
    given = _read_reason(form)
    return Reason(reason=f"{given} (by {username})" if given else f"by {username}")


def _read_reason(form: Form) -> str | None:
    return form.get("reason", "").strip()[:_MAX_REASON] or None


def _send_event(operations: Operations, target: Target, form: Form, _: str) -> str:
    text = form.get("payload", "").strip()
    try:
        payload = json.loads(text) if text else None
    except ValueError as error:
        raise FormInvalid(f"The payload is not JSON: {error}.") from None
    event = SendEvent(type=form.get("type", "").strip(), payload=payload, id=form.get("event_id", "").strip() or None)
    if not commands.send_event.run(operations, target, event).accepted:
        raise NothingChanged(f"An event with the id {event.id!r} was accepted before, so this one is ignored.")
    return "event sent"


def _is_open(row: InstanceRow) -> bool:
    return not row.status.is_terminal


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "pause", "Pause", "pause_instance",
            lambda row: row.status in (Status.ACTIVE, Status.WAITING) and not row.pause_requested, _pause,
        ),
        Action(
            "resume", "Resume", "pause_instance",
            lambda row: row.status is Status.PAUSED or row.pause_requested, _resume,
        ),
        Action(
            "retry", "Retry the failed step", "retry_instance",
            lambda row: row.status is Status.ERRORED, _retry, takes_reason=True,
        ),
        Action(
            "restart", "Restart from the beginning", "retry_instance",
            lambda row: row.status.is_terminal, _restart, is_confirmed=True, takes_reason=True,
        ),
        Action(
            "cancel", "Cancel, and clean up", "terminate_instance",
            _is_open, _cancel, is_confirmed=True, takes_reason=True,
        ),
        Action(
            "terminate", "Terminate", "terminate_instance",
            _is_open, _terminate, is_confirmed=True, takes_reason=True,
        ),
        Action(
            "send_event", "Send the event", "send_event_instance",
            _is_open, _send_event, is_for_many=False,
        ),
    )
}  # fmt: skip


_MAX_SELECTED = 100


@admin.register(Instance)
class InstanceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # Django's class takes no argument at run time
    """The pages of instances. An instance's id in the admin is ``workflow/instance``."""

    list_template = "celery_durable/admin/list.html"
    instance_template = "celery_durable/admin/instance.html"
    confirmation_template = "celery_durable/admin/confirmation.html"

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: instances are created by the application."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: instances are changed by the actions alone."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: retention deletes instances."""
        return False

    def has_action_permission(self, request: HttpRequest, action: Action) -> bool:
        """Whether the user may do this action."""
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.{action.permission}"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Instance | None:
        """Return an instance for the page of changes, or None. Its key is the one that the admin's addresses have."""
        workflow, instance_id = split_key(object_id)
        try:
            found = wiring.find_durable().internals.operations.queries.read(workflow, instance_id)
        except InstanceNotFound:
            return None
        return Instance(id=object_id, workflow=workflow, instance_id=instance_id, status=found.status.value)

    # --- the list -------------------------------------------------------------------------------

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show a page of instances, or do an action on the selected ones."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            targets = [Target(*split_key(each)) for each in request.POST.getlist("selected")[:_MAX_SELECTED]]
            return self._act(request, targets, back=request.get_full_path())
        query = ListQuery.read(request.GET)
        internals = wiring.find_durable().internals
        try:
            page = ListPage.read(internals, query)
        except DurableError as error:
            messages.error(request, str(error))
            page = ListPage.make_empty(internals, query)
        actions = [each for each in self._permitted(request) if each.is_for_many]
        more = {"title": "Select an instance", "page": page, "actions": actions}
        return self._render(request, self.list_template, more | (extra_context or {}))

    # --- one instance ---------------------------------------------------------------------------

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show an instance, or do an action on it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        workflow, instance_id = split_key(unquote(object_id))
        if not workflow:
            messages.error(request, f"The address names no instance: {instance_id!r} is not WORKFLOW/INSTANCE.")
            return HttpResponseRedirect(self._url("changelist"))
        if request.method == "POST":
            return self._act(request, [Target(workflow, instance_id)], back=request.get_full_path())
        try:
            page = InstancePage.read(wiring.find_durable().internals, workflow, instance_id, request.GET)
        except DurableError as error:
            messages.error(request, str(error))
            return HttpResponseRedirect(self._url("changelist"))
        actions = [each for each in self._permitted(request) if each.is_possible(page.row)]
        more = {
            "title": join_key(workflow, instance_id),
            "page": page,
            "actions": actions,
            "history_url": self._url("history", object_id),
        }
        return self._render(request, self.instance_template, more | (extra_context or {}))

    # --- actions --------------------------------------------------------------------------------

    def _act(self, request: HttpRequest, targets: Sequence[Target], *, back: str) -> HttpResponse:
        """Do the action of a form. Each instance has a transaction of its own, together with its log entry."""
        action = ACTIONS.get(request.POST.get("action", ""))
        if action is None or not targets:
            messages.warning(request, "Select an action and at least one instance.")
            return HttpResponseRedirect(back)
        if not self.has_action_permission(request, action):
            raise PermissionDenied
        if action.is_confirmed and "confirmed" not in request.POST:
            more = {
                "title": "Are you sure?",
                "action": action,
                "selected": [join_key(each.workflow, each.instance_id) for each in targets],
                "reason": request.POST.get("reason", ""),
                "back": back,
            }
            return self._render(request, self.confirmation_template, more)
        for target in targets:
            name = join_key(target.workflow, target.instance_id)
            try:
                done = self._act_on(request, action, target)
            except (DurableError, FormInvalid) as error:
                messages.error(request, f"Instance {name}: {error}")
            except NothingChanged as why:
                messages.warning(request, f"Instance {name}: {why}")
            else:
                messages.success(request, f"Instance {name}: {done}.")
        return HttpResponseRedirect(back)

    def _act_on(self, request: HttpRequest, action: Action, target: Target) -> str:
        username, operations = request.user.get_username(), wiring.find_durable().internals.operations
        # Both are committed together if the log is in the database with the workflows, else the action comes first.
        with transaction.atomic(using=router.db_for_write(LogEntry)):
            with transaction.atomic(using=wiring.get_alias()):
                done = action.run(operations, target, request.POST, username)
            LogEntry.objects.create(
                user_id=request.user.pk,
                content_type_id=ContentType.objects.get_for_model(Instance).pk,
                object_id=join_key(target.workflow, target.instance_id),
                object_repr=join_key(target.workflow, target.instance_id)[:200],
                action_flag=CHANGE,
                change_message=action.describe(done, request.POST),
            )
        return done

    def _permitted(self, request: HttpRequest) -> list[Action]:
        return [each for each in ACTIONS.values() if self.has_action_permission(request, each)]

    # --- rendering ------------------------------------------------------------------------------

    def _render(self, request: HttpRequest, template: str, more: dict[str, Any]) -> HttpResponse:
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media, **more}
        return TemplateResponse(request, template, context)

    def _url(self, page: str, *args: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)
