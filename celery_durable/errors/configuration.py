"""Errors of what an application declares: its settings, workflows and steps."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError, quote


class NotConfigured(DurableError):
    """A workflow was used in a process without a `Durable` that is attached to a Celery app.

    Also raised if several apps have one and none of them is current. Import the module that creates it first, or call
    ``app.set_current()``.

    Attributes:
        what: What needs a `Durable`.
    """

    code = "NOT_CONFIGURED"

    def __init__(self, what: str, remedy: str | None = None) -> None:
        self.what = what
        super().__init__(
            f"{what} needs a Durable, and this process has none (or several and no current Celery app). "
            "Either attach one to your app, `durable = Durable(app)`, and import that module first, "
            "or make the app current with `app.set_current()`."
            if remedy is None
            else f"{what} needs a Durable, and there is none here. {remedy}"
        )


class ConfigInvalid(DurableError):
    """A setting, or an argument that configures something, has a value that cannot be used.

    The message says which values can.

    Attributes:
        setting: The name of the setting or argument.
        value: Its value.
        remedy: Which values can be used.
    """

    code = "CONFIG_INVALID"

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        self.setting, self.value, self.remedy = setting, value, remedy
        super().__init__(f"Setting {setting}={quote(value)} cannot be used: {remedy}")


class SettingUnknown(ConfigInvalid):
    """There is no ``durable_*`` setting of this name.

    Correct the name or remove the setting. Its value is not shown, since it may be a URL with a password.

    Attributes:
        setting: The unknown name, as it is written in the configuration.
        value: None.
        remedy: What to do about it.
    """

    code = "SETTING_UNKNOWN"

    def __init__(self, setting: str, near: str | None) -> None:
        remedy = "Remove it." if near is None else f"Did you mean {near}?"
        self.setting, self.value, self.remedy = setting, None, remedy
        DurableError.__init__(self, f"There is no setting {setting}. {remedy}")


class CreateDisabled(DurableError):
    """A new instance was refused, because ``durable_create_enabled`` is off.

    Existing instances continue. Turn the setting on, or try again later.
    """

    code, http_status = "CREATE_DISABLED", 409

    def __init__(self) -> None:
        super().__init__(
            "New instances are refused while durable_create_enabled is off. Existing instances continue. "
            "Turn the setting on, or try again later."
        )


class DefinitionInvalid(DurableError):
    """A workflow, a step or a registration cannot work as it is written.

    Raised where the definition is made or used. The message says what to change.
    """

    code = "DEFINITION_INVALID"


class AsyncNotSupported(DefinitionInvalid):
    """A workflow, or a function for a method of `StepTx` or for ``delay=``, is an ``async def``.

    Write a plain function. The functions of steps, and handlers, may be async.

    Attributes:
        name: The function's or the workflow's name.
    """

    code = "ASYNC_NOT_SUPPORTED"

    def __init__(self, what: str, name: str) -> None:
        self.name = name
        super().__init__(
            f"{what} {name!r} is an async function. Write it as a plain function; only functions of steps and handlers "
            "may be async: step.do('ask', async_function, 'why?')."
        )


class LimitConflict(DefinitionInvalid):
    """A limit has the name of one that a module of this process defines, and other numbers.

    Define the limit once, and import it where it is used.

    Attributes:
        name: The limit's name.
    """

    code = "LIMIT_CONFLICT"

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        super().__init__(
            f"Limit {name!r} is defined with {first}, and again with {second}. Define it once and import it, or give "
            "one of them another name."
        )


class WorkflowNameTaken(DurableError):
    """Two different workflows have the same name.

    Give one of them another: ``@durable_workflow(name=...)``.

    Attributes:
        name: The name.
    """

    code = "WORKFLOW_NAME_TAKEN"

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        super().__init__(
            f"Workflow name {name!r} is already taken by {first}; {second} needs another: @durable_workflow(name=...)."
        )


class BindingKeyTaken(DurableError):
    """Two different workflows were registered under the same binding key.

    Register one of them under another key: ``durable.register({...})``.

    Attributes:
        key: The binding key.
    """

    code = "BINDING_KEY_TAKEN"

    def __init__(self, key: str, first: str, second: str) -> None:
        self.key = key
        super().__init__(
            f"Binding key {key!r} is already taken by {first}; register {second} under another: "
            "durable.register({...})."
        )


class WorkflowsRequired(DurableError):
    """A package that runs workflows was set up without a `WorkflowService`.

    Pass it ``durable.service`` of your application.

    Attributes:
        package: The package's name.
    """

    code, http_status = "WORKFLOWS_REQUIRED", 503

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"{package} runs durable workflows, and was given nothing to run them. Pass it the service of your "
            "application, `durable.service`, and register its workflows: durable.register(required_workflows)."
        )


class WorkflowNotFound(DurableError):
    """No workflow of this name is registered in this process.

    Import the module that defines it, or add it to the Celery app's ``imports``.

    Attributes:
        name: The name that was looked up.
    """

    code, http_status = "WORKFLOW_NOT_FOUND", 404

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"No workflow is registered as {name!r} in this process (registered: {listed}). "
            "Import the module that defines it, or add it to the Celery app's `imports`."
        )
