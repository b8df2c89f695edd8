"""What public docstrings name can be imported from the modules that docs/index.md lists."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from celery import Celery

import celery_durable
from celery_durable import CreateOptions, Durable, Step, Workflow, WorkflowEvent, WorkflowInstance, WorkflowService
from celery_durable.config import Settings
from celery_durable.errors import StoreUnavailable
from celery_durable.runtime import Runtime
from tests.docs.blocks import ROOT
from tests.docs.public import Docstring, docstrings, documented_modules, exports

DOCSTRINGS = docstrings()
EXPORTED = {name: value for module in documented_modules().values() for name, value in exports(module).items()}
MEMBERS = {name for value in EXPORTED.values() for name in dir(value)} | {
    name for value in EXPORTED.values() for name in getattr(value, "__dataclass_fields__", ())
}
"""What can be written behind the dot of a public object."""

PARTS = {"Host", "LinearDefinition", "Redaction", "Code", "RedactedKind", "WorkflowKind", "OutboxKind", "PassResult"}
"""Returned to other parts of the package, not to its users; and enums of text, which users compare with text."""

DESCRIBED = [
    celery_durable.Step,
    celery_durable.StepFuture,
    celery_durable.StepLog,
    celery_durable.StepTx,
    celery_durable.Workflow,
    celery_durable.WorkflowInstance,
]
"""Classes whose methods have sections for arguments, results and errors."""

_CAMEL = r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+"
_SPANS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)|``([^`\n]+)``")


class Defined(NamedTuple):
    """The names of all classes and of all functions of the package, public or not."""

    classes: set[str]
    functions: set[str]


@functools.cache
def defined_in_the_package() -> Defined:
    """Parse the package. Not on import: each process that collects tests would spend seconds on it."""
    classes: set[str] = set()
    functions: set[str] = set()
    for path in (ROOT / "celery_durable").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.add(node.name)
    return Defined(classes, functions)


def named_classes(text: str) -> set[str]:
    """Classes of the package: camel-case words, single words in backticks and the entries of ``Raises:``."""
    words = set(re.findall(rf"\b{_CAMEL}\b", text))
    words |= {word for span in _SPANS.findall(text) for word in re.findall(r"\b[A-Z]\w+", "".join(span))}
    raises = text.partition("Raises:\n")[2].partition("\n\n")[0]
    words |= set(re.findall(r"^ +([A-Z]\w+):", raises, re.MULTILINE))
    return words & defined_in_the_package().classes


def references(text: str) -> list[str]:
    """What single backticks hold: references to names of Python, with or without parentheses."""
    return [re.sub(r"\(.*\)$", "", span) for span, _ in _SPANS.findall(text) if span]


def is_known(reference: str, docstring: Docstring) -> bool:
    head, *rest = reference.lstrip("@").split(".")
    if head == "celery_durable":
        return reference in documented_modules() or rest[-1] in EXPORTED
    if not rest and head in _parameters(docstring.subject) | MEMBERS | EXPORTED.keys():
        return True
    if head.removeprefix("durable_") in Settings.__dataclass_fields__:
        return True
    value = EXPORTED.get(head)
    attributes = {*dir(value), *getattr(value, "__annotations__", ()), *_parameters(value)}
    return value is not None and (not rest or rest[0] in attributes)


def _parameters(subject: Any) -> set[str]:
    """Of a function, or of a class's constructor, whose parameters errors keep as attributes."""
    taken = vars(subject).get("__init__") if inspect.isclass(subject) else subject
    return set(inspect.signature(taken).parameters) if inspect.isroutine(taken) else set()


def test_public_docstrings_name_only_classes_that_can_be_imported() -> None:
    missing = {str(each): named_classes(each.text) - EXPORTED.keys() for each in DOCSTRINGS}
    assert {name: classes for name, classes in missing.items() if classes} == {}


def test_references_in_public_docstrings_lead_somewhere() -> None:
    heads = set().union(*defined_in_the_package())
    wrong = {
        str(each): [
            reference
            for reference in references(each.text)
            if re.split(r"\W", reference.lstrip("@"))[0] in heads and not is_known(reference, each)
        ]
        for each in DOCSTRINGS
    }
    assert {name: found for name, found in wrong.items() if found} == {}


def returned_classes(docstring: Docstring) -> set[str]:
    """Classes of the package that a call returns, or that a field of a dataclass holds."""
    if inspect.isclass(docstring.subject):
        held = vars(docstring.subject).get("__annotations__", {})
    else:
        held = {"return": getattr(docstring.subject, "__annotations__", {}).get("return")}
    text = " ".join(kind for name, kind in held.items() if isinstance(kind, str) and not name.startswith("_"))
    return set(re.findall(r"\b[A-Z]\w+", text)) & defined_in_the_package().classes


def test_what_public_calls_return_can_be_imported() -> None:
    missing = {str(each): returned_classes(each) - EXPORTED.keys() - PARTS for each in DOCSTRINGS}
    assert {name: classes for name, classes in missing.items() if classes} == {}


def documented_names(text: str, section: str) -> list[str]:
    """The names that a section of a docstring explains, in order; continuation lines are indented further."""
    body = text.partition(f"{section}:\n")[2].partition("\n\n")[0]
    first = re.search(r"^ +", body)
    return re.findall(rf"^{first[0]}(\w+): ", body, re.MULTILINE) if first else []


def methods(owner: type[Any]) -> dict[str, Any]:
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return {name: method for name, method in found.items() if inspect.isfunction(method)}


@pytest.mark.parametrize("owner", DESCRIBED, ids=lambda owner: owner.__name__)
def test_a_method_explains_its_parameters_or_names_the_method_that_does(owner: type[Any]) -> None:
    for name, method in methods(owner).items():
        text = method.__doc__ or ""
        parameters = [each for each in inspect.signature(method).parameters if each != "self"]
        if "Args:" in text:
            assert documented_names(text, "Args") == parameters, name
        else:
            assert not parameters or re.match(r"`\w+` for async|Submit a call of `|.*, as `\w+` does", text), name


@pytest.mark.parametrize("owner", DESCRIBED, ids=lambda owner: owner.__name__)
def test_what_a_method_raises_is_an_exported_error(owner: type[Any]) -> None:
    for name, method in methods(owner).items():
        for error in documented_names(method.__doc__ or "", "Raises"):
            assert issubclass(EXPORTED[error], celery_durable.DurableError), f"{name}: {error}"


class Hurried(Runtime):
    def back_off(self, times: int) -> None:
        """Do not wait: no try can succeed."""


@pytest.fixture
def unreachable() -> Iterator[Durable]:
    """A Durable whose database cannot be reached."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = "postgresql+psycopg://shop@127.0.0.1:1/shop"
    durable = Durable(app, runtime=Hurried())
    yield durable
    durable.close()


CALLS: dict[type[Any], dict[str, Callable[[Any], object]]] = {
    Durable: {
        "emit": lambda durable: durable.emit("prices"),
        "migrate": lambda durable: durable.migrate(),
        "tick": lambda durable: durable.tick(),
        "waiters": lambda durable: durable.waiters("prices"),
    },
    Workflow: {
        "create": lambda order: order.create(),
        "create_batch": lambda order: order.create_batch([CreateOptions(id="o-1")]),
        "get": lambda order: order.get("o-1"),
        "list": lambda order: order.list(),
        "restart_or_create": lambda order: order.restart_or_create(id="o-1"),
    },
    WorkflowInstance: {
        "explain": lambda instance: instance.explain(),
        "fork": lambda instance: instance.fork("pay"),
        "history": lambda instance: instance.history(),
        "logs": lambda instance: instance.logs(),
        "pause": lambda instance: instance.pause(),
        "published": lambda instance: instance.published(),
        "restart": lambda instance: instance.restart(),
        "result": lambda instance: instance.result(),
        "resume": lambda instance: instance.resume(),
        "retry": lambda instance: instance.retry(),
        "send_event": lambda instance: instance.send_event("approval"),
        "set_result": lambda instance: instance.set_result("pay", 1, by="eve"),
        "skip": lambda instance: instance.skip("pay", by="eve"),
        "status": lambda instance: instance.status(),
        "terminate": lambda instance: instance.terminate(),
    },
    WorkflowService: {
        "create_instance": lambda service: service.create_instance("order"),
        "get_instance_status": lambda service: service.get_instance_status("order", "o-1"),
        "list_history": lambda service: service.list_history("order", "o-1"),
        "send_event": lambda service: service.send_event("order", "o-1", "approval"),
    },
}


@pytest.mark.parametrize("owner", CALLS, ids=lambda owner: owner.__name__)
def test_a_method_that_an_outage_of_the_database_ends_names_the_error(owner: type[Any], unreachable: Durable) -> None:
    @unreachable.workflow(name="order")
    def order(event: WorkflowEvent[None], step: Step) -> None: ...

    subjects = {
        Durable: unreachable,
        Workflow: order,
        WorkflowInstance: WorkflowInstance(order, "o-1"),
        WorkflowService: unreachable.service,
    }
    for call in CALLS[owner].values():
        with pytest.raises(StoreUnavailable):
            call(subjects[owner])
    named = {
        name
        for name, each in methods(owner).items()
        if "StoreUnavailable" in documented_names(each.__doc__ or "", "Raises")
    }
    assert named == CALLS[owner].keys()
