"""The instances in Django's admin: a list, one page for each instance, and actions with a permission each.

The pages read and change instances by the same operations as the HTTP API. So reads are bounded (LAW 10), a `redact`
hook applies, and a prefix or a schema of the tables does not matter. Nothing can be edited but by the actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from celery_durable.commands import Target
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.admin_actions import ACTIONS, Action, FormInvalid, NothingChanged
from celery_durable.contrib.django.admin_pages import InstancePage, ListPage, ListQuery
from celery_durable.contrib.django.models import Instance, join_key, split_key
from celery_durable.errors import DurableError, InstanceNotFound

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
