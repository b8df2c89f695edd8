"""Errors of workflow and step definitions, and of their registration."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError


class DefinitionInvalid(DurableError):
    """A workflow, a step or a registration cannot work as it is written.

    Raised where the definition is made or used. The message says what to change.
    """

    code = "DEFINITION_INVALID"


class AsyncNotSupported(DefinitionInvalid):
    """A workflow, a step's function, a handler, or a function of `StepTx` or for ``delay=`` is an ``async def``.

    Write a plain function. Inside a step, ``asyncio.run(...)`` is allowed.

    Attributes:
        name: The function's or the workflow's name.
    """

    code = "ASYNC_NOT_SUPPORTED"

    def __init__(self, what: str, name: str) -> None:
        self.name = name
        super().__init__(
            f"{what} {name!r} is an async function, and async workflows and steps are not supported yet. "
            "Write it as a plain function; inside a step, asyncio.run(...) is allowed."
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
