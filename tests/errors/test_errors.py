from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
from datetime import timedelta
from typing import Any

from celery_durable import errors
from celery_durable.errors import DurableError, Interruption

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, (DurableError, Interruption)) and kind.__module__ == errors.__name__
]
DURABLE = [kind for kind in CLASSES if issubclass(kind, DurableError)]
BY_NAME: dict[str, Any] = {
    "problems": [("$.a", "is wrong")],
    "steps": ["a", "b"],
    "known": ["a"],
    "seconds": 1.5,
    "concurrently": True,
    "item": "i-1",
}
BY_TYPE: dict[str, Any] = {"int": 3, "timedelta": timedelta(days=1), "Sequence[str]": ["a"], "str | None": None}


def example(kind: type[Any]) -> Any:
    """An instance, made with some value for every parameter."""
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        value = BY_NAME.get(parameter.name, BY_TYPE.get(parameter.annotation, parameter.name))
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            arguments.append(value)
    return kind(*arguments, **named)


def test_an_error_survives_pickling_and_copying_with_its_attributes() -> None:
    for kind in DURABLE:
        error = example(kind)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is kind
            assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


def test_the_docstring_of_an_error_documents_its_attributes() -> None:
    for kind in DURABLE:
        sections = ((base.__doc__ or "").partition("Attributes:")[2] for base in kind.__mro__)
        documented = {name for text in sections for name in re.findall(r"^        (\w+): ", text, re.MULTILINE)}
        assert vars(example(kind)).keys() <= documented, kind


def test_what_unwinds_author_code_is_no_exception_that_he_would_catch() -> None:
    interruptions = [kind for kind in CLASSES if issubclass(kind, Interruption)]
    assert len(interruptions) > 1
    assert not any(issubclass(kind, Exception) for kind in interruptions)


def test_a_code_belongs_to_one_error_unless_it_is_inherited() -> None:
    owners: dict[str, type[DurableError]] = {}
    for kind in DURABLE:
        if "code" in vars(kind):
            assert owners.setdefault(kind.code, kind) is kind
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.code)
        assert kind.http_status in range(400, 600)


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    told = set(re.findall(r"[A-Z]\w+", errors.__doc__))
    assert {kind.__name__ for kind in CLASSES} <= told


def test_every_error_of_the_folder_is_exported_under_its_documented_name() -> None:
    tree = [DurableError, Interruption]
    for kind in tree:
        tree += [child for child in kind.__subclasses__() if child.__module__.startswith("celery_durable.errors")]
    assert {kind.__name__ for kind in tree} == set(errors.__all__)
    for kind in tree:
        assert getattr(importlib.import_module(kind.__module__), kind.__name__) is kind
        assert kind.__module__ == "celery_durable.errors"


def test_timeouts_are_timeouts_to_everybody() -> None:
    for kind in (errors.ResultTimeout, errors.StepTimeout, errors.EventTimeout):
        assert issubclass(kind, TimeoutError)


def test_a_value_whose_repr_fails_is_shown_by_its_type() -> None:
    class Grumpy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert str(errors.NameInvalid("Step name", Grumpy(), "use text")) == (
        "Step name <Grumpy> is not allowed: use text."
    )


def test_only_the_first_problems_are_listed() -> None:
    problems = [(f"$.{n}", "is wrong") for n in range(7)]
    assert str(errors.WorkflowParamsInvalid("order", problems, item="o-1")) == (
        "Parameters of workflow 'order' for instance 'o-1' are not valid: $.0: is wrong; $.1: is wrong; "
        "$.2: is wrong; $.3: is wrong; $.4: is wrong; and 2 more."
    )


def test_a_failed_step_counts_its_attempts_in_words() -> None:
    once = errors.StepFailed("charge", "CardDeclined", "no funds", 1)
    often = errors.StepTimeout("charge", "StepTimeout", "too slow", 3)
    assert str(once) == "Step 'charge' failed after 1 attempt: CardDeclined: no funds"
    assert str(often) == "Step 'charge' failed after 3 attempts: StepTimeout: too slow"


def test_an_error_without_a_message_is_shown_by_its_name_alone() -> None:
    assert str(errors.StepFailed("charge", "AssertionError", "", 1)) == (
        "Step 'charge' failed after 1 attempt: AssertionError"
    )
    assert str(errors.WorkflowFailed("order", "o-1", "errored", "AssertionError", "")) == (
        "Instance 'o-1' of workflow 'order' ended errored: AssertionError"
    )
