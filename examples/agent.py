"""An agent of Pydantic AI answers customers. It refunds an order once a person has approved that.

Its model is scripted, so it runs without a network: put the name of a real one in the place of ``FunctionModel``.
Each model request and each tool call is a step.

From the folder above this one, once, and then in one terminal:

    celery -A examples.agent durable migrate
    celery -A examples.agent worker

In another:

    celery -A examples.agent durable start support --params '"refund order 42"' --id s-1
    celery -A examples.agent durable waits --to finance
    celery -A examples.agent durable answer support s-1 'approval c3' '{"c3": true}'
    celery -A examples.agent durable show support s-1
"""

from __future__ import annotations

from celery import Celery
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from celery_durable import Durable, Step, WorkflowEvent, durable_workflow
from celery_durable.contrib.pydantic_ai import CeleryDurability, RequestInput, run_agent
from examples import embedded

app = Celery("support")
app.conf.update(embedded.settings())
app.conf.durable_dispatcher = "both"
durable = Durable(app)

requests: list[str] = []
"""The model requests that were paid for, and the refunds that were made."""
refunds: list[str] = []


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Do what a model would do: look up the order and its customer, refund it, and tell the customer."""
    del info
    results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    requests.append(f"request {len(results)}")
    if not results:
        order = {"order": "42"}
        return ModelResponse(parts=[ToolCallPart("price", order, "c1"), ToolCallPart("customer", order, "c2")])
    if results[-1].tool_name != "refund":
        return ModelResponse(parts=[ToolCallPart("refund", {"order": "42"}, "c3")])
    return ModelResponse(parts=[TextPart(f"Our answer: {results[-1].content}")])


agent = Agent(FunctionModel(scripted), name="support", capabilities=[CeleryDurability(), RequestInput(to="finance")])


@agent.tool_plain
async def price(order: str) -> str:
    return f"order {order} cost 5 EUR"


@agent.tool_plain
def customer(order: str) -> str:
    return f"the customer of order {order} is Ada"


@agent.tool_plain(requires_approval=True)
def refund(order: str) -> str:
    refunds.append(order)
    return f"refunded order {order}"


@durable_workflow(name="support")
def support(event: WorkflowEvent[str], step: Step) -> str:
    return run_agent(step, lambda: agent.run(event.payload)).output
