"""Errors of workflow and step definitions, and of their registration."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError


class DefinitionInvalid(DurableError):
    """A workflow or step definition cannot work as written."""

    code = "DEFINITION_INVALID"


class AsyncNotSupported(DefinitionInvalid):
    """``async def`` workflows and step bodies are not supported yet."""

    code = "ASYNC_NOT_SUPPORTED"

    def __init__(self, what: str, name: str) -> None:
        self.name = name
        super().__init__(
            f"{what} {name!r} is an async function, and async workflows and steps are not supported yet. "
            "Write it as a plain function; inside a step, asyncio.run(...) is allowed."
        )


class WorkflowNameTaken(DurableError):
    """Two different workflows claim the same name."""

    code = "WORKFLOW_NAME_TAKEN"

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        super().__init__(
            f"Workflow name {name!r} is already taken by {first}; {second} needs another: @durable_workflow(name=...)."
        )


class BindingKeyTaken(DurableError):
    """Two different workflows claim the same binding key."""

    code = "BINDING_KEY_TAKEN"

    def __init__(self, key: str, first: str, second: str) -> None:
        self.key = key
        super().__init__(
            f"Binding key {key!r} is already taken by {first}; register {second} under another: "
            "durable.register({...})."
        )


class WorkflowsRequired(DurableError):
    """A package that runs workflows was set up without a service that does."""

    code, http_status = "WORKFLOWS_REQUIRED", 503

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"{package} runs durable workflows, and was given nothing to run them. Pass it the service of your "
            "application, `durable.service`, and register its workflows: durable.register(required_workflows)."
        )


class WorkflowNotFound(DurableError):
    """No workflow of this name is registered in this process."""

    code, http_status = "WORKFLOW_NOT_FOUND", 404

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"No workflow is registered as {name!r} in this process (registered: {listed}). "
            "Import the module that defines it, or add it to the Celery app's `imports`."
        )
