"""``celery -A tests.smoke.agents``: an agent whose worker dies when its tools have done their work, the first time."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery import Celery
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from celery_durable import Step, WorkflowEvent
from celery_durable.contrib.pydantic_ai import CeleryDurability, RequestInput, run_agent
from tests.smoke import dying, flows
from tests.smoke.config import Config


def build(config: Config) -> Celery:
    """The application of the smoke tests, and `refunds`, whose parameter is the tool that its model calls."""
    app = flows.build(config)

    def note(line: str) -> None:
        with config.path("noted").open("a") as noted:
            noted.write(f"{line}\n")

    def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        del info
        note("request")
        returned = [part.content for each in messages for part in each.parts if isinstance(part, ToolReturnPart)]
        if returned:
            return ModelResponse(parts=[TextPart(str(returned[-1]))])
        return ModelResponse(parts=[ToolCallPart(messages[0].parts[0].content, {}, "c1")])

    model, durability = FunctionModel(scripted), CeleryDurability()
    agent: Agent[None, str] = Agent(model, name="desk", capabilities=[durability, RequestInput()])

    async def refund() -> str:
        note("refund")
        if not config.path("died").exists():
            config.path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "refunded"

    agent.tool_plain(refund)
    agent.tool_plain(name="approved_refund", requires_approval=True)(refund)

    @vars(app)["durable"].workflow(name="refunds")
    def refunds(event: WorkflowEvent[str], step: Step) -> Any:
        return run_agent(step, lambda: agent.run(event.payload)).output

    return app


if "DURABLE_SMOKE" in os.environ:
    app = dying.make_app(build)
