from __future__ import annotations

import functools
import gc
import logging
import typing
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any
from unittest.mock import AsyncMock

import pytest
from pydantic import BaseModel

from celery_durable import step as step_module
from celery_durable.definitions import describe_step, durable_step
from celery_durable.errors import ConfigInvalid, DefinitionInvalid
from celery_durable.step import StepTx
from celery_durable.step import StepTx as Transaction
from celery_durable.values import PayloadLimits, StepConfig

if typing.TYPE_CHECKING:
    from somewhere import Elsewhere

    from celery_durable import step as hidden


class Receipt(BaseModel):
    on: date


@dataclass
class Charger:
    card: str

    def __call__(self, amount: int) -> date:
        return date(2030, 1, amount)

    def charge(self, amount: int) -> date:
        return date(2030, 1, amount)

    def charge_in(self, tx: StepTx, amount: int) -> None: ...

    @classmethod
    def of(cls, tx: StepTx) -> None: ...

    @staticmethod
    def charge_for(tx: StepTx) -> None: ...


def charge(amount: int) -> date:
    return date(2030, 1, amount)


def comes_back(fn: Any, value: Any) -> Any:
    codec = describe_step(fn).result
    return codec.decode(codec.encode(value, what="Result", limits=PayloadLimits()))


# --- what a callable is called and returns --------------------------------------------------------


def test_a_step_is_named_after_what_it_calls_if_that_has_a_name() -> None:
    for fn, name in [
        (charge, "charge"),
        (lambda: 1, None),
        (Charger("x").charge, "charge"),
        (functools.partial(charge, 1), "charge"),
        (functools.partial(functools.partial(Charger("x").charge), 1), "charge"),
        (functools.partial(lambda x: x, 1), None),
        (Charger("x"), None),
        (len, "len"),
        ("a".join, "join"),
        (Receipt, "Receipt"),
        (dict, "dict"),
    ]:
        found = describe_step(fn)
        assert (found.name, found.config, found.wants_tx) == (name, None, False)


def test_a_result_comes_back_as_the_return_annotation_says() -> None:
    for fn in [
        charge,
        Charger("x").charge,
        functools.partial(charge),
        functools.partial(charge, amount=1),
        Charger("x"),
    ]:
        assert comes_back(fn, date(2030, 1, 2)) == date(2030, 1, 2)


def test_a_class_returns_itself() -> None:
    assert comes_back(Receipt, Receipt(on=date(2030, 1, 2))) == Receipt(on=date(2030, 1, 2))
    assert comes_back(Charger, Charger("x")) == Charger("x")
    assert comes_back(dict, {"a": 1}) == {"a": 1}


def elsewhere(order: Elsewhere) -> Receipt: ...  # type: ignore[empty-body]
def to_elsewhere() -> Elsewhere: ...
def with_a_remark() -> "the sum":  # noqa: F722  # type: ignore[syntax]  # an annotation from before types
    return 1


def test_without_a_type_that_exists_a_result_is_plain_json() -> None:
    for fn in [lambda: 1, len, with_a_remark, to_elsewhere, functools.partial(to_elsewhere)]:
        assert not describe_step(fn).result.is_typed
        assert comes_back(fn, {"on": date(2030, 1, 2)}) == {"on": "2030-01-02"}


def test_a_parameter_that_only_type_checkers_know_does_no_harm_to_the_result(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "celery_durable"):
        assert comes_back(elsewhere, Receipt(on=date(2030, 1, 2))) == Receipt(on=date(2030, 1, 2))
    assert caplog.messages == []


def test_a_result_type_that_does_not_exist_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def describe_a_new_one() -> None:
        def lost() -> Elsewhere: ...

        describe_step(lost)

    with caplog.at_level(logging.WARNING, "celery_durable"):
        describe_a_new_one()
        describe_a_new_one()
    where = "test_a_result_type_that_does_not_exist_is_told_once.<locals>.describe_a_new_one.<locals>.lost"
    assert caplog.messages == [
        f"Annotation Elsewhere of {__name__}.{where} names nothing that exists at run time, so its values stay plain "
        "JSON data: import or define it at the top of the module"
    ]


# --- who gets the transaction ---------------------------------------------------------------------


def annotated(session: StepTx, amount: int) -> None: ...
def renamed(session: Transaction) -> None: ...
def dotted(session: step_module.StepTx) -> None: ...
def quoted(session: "StepTx") -> None: ...  # noqa: UP037  # quoted twice
def hidden_name(session: hidden.StepTx) -> None: ...
def bare_name(tx, amount):  # type: ignore[no-untyped-def]
    return None


def positional(tx, /):  # type: ignore[no-untyped-def]
    return None


def with_default(tx=None):  # type: ignore[no-untyped-def]
    return None


def order_first(order: int, tx: StepTx) -> None: ...


class MakesRow:
    def __init__(self, tx: StepTx, amount: int) -> None: ...


class Writes:
    def __call__(self, tx: StepTx) -> None: ...


class Recorder(StepTx):
    """A subclass is a StepTx."""


def subclassed(session: Recorder) -> None: ...


@functools.wraps(annotated)
def decorated(*args: Any) -> None: ...


def test_a_step_whose_first_parameter_asks_for_the_transaction_gets_it() -> None:
    for fn in [
        annotated,
        renamed,
        dotted,
        quoted,
        hidden_name,
        subclassed,
        decorated,
        bare_name,
        positional,
        with_default,
        lambda tx: None,
        Charger("x").charge_in,
        Charger.of,
        Charger.charge_for,
        MakesRow,
        Writes(),
        functools.partial(annotated),
        functools.partial(annotated, amount=1),
        functools.partial(functools.partial(annotated, amount=1)),
        functools.partial(order_first, 1),
    ]:
        assert describe_step(fn).wants_tx, fn


def other_type(tx: int) -> None: ...
def other_hidden_type(tx: Elsewhere) -> None: ...
def untyped_other_name(session):  # type: ignore[no-untyped-def]
    return None


def keyword_only(*, tx: StepTx) -> None: ...
def gathered(*tx: StepTx) -> None: ...
def keywords(**tx: StepTx) -> None: ...


def test_any_other_step_does_not() -> None:
    for fn in [
        charge,
        other_type,
        other_hidden_type,
        untyped_other_name,
        keyword_only,
        gathered,
        keywords,
        order_first,
        lambda: None,
        lambda order, tx: None,
        len,
        dict,
        "a".join,
        functools.partial(annotated, object()),
        functools.partial(annotated, session=object()),
        functools.partial(bare_name, object()),
    ]:
        assert not describe_step(fn).wants_tx, fn


# --- async ----------------------------------------------------------------------------------------


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


@durable_step(retries=1)
async def marked() -> None: ...


@functools.wraps(coroutine)
async def wrapped_in_async() -> None: ...


@functools.wraps(coroutine)
def wrapped_in_plain() -> None: ...


class AsyncCallable:
    async def __call__(self) -> None: ...

    async def method(self) -> None: ...

    def __repr__(self) -> str:
        return "<an async callable>"


def test_an_async_function_is_recognized_however_it_is_given() -> None:
    for fn in [
        coroutine,
        marked,
        wrapped_in_async,
        AsyncMock(),
        functools.partial(coroutine),
        functools.partial(functools.partial(AsyncCallable().method)),
        AsyncCallable().method,
        AsyncCallable(),
    ]:
        assert describe_step(fn).is_async, fn
    for fn in [len, lambda: 1, AsyncCallable, functools.partial(len), wrapped_in_plain]:
        assert not describe_step(fn).is_async, fn


def test_an_async_generator_is_refused_before_it_runs_and_where_it_is_marked() -> None:
    for register in [describe_step, durable_step(retries=1)]:
        for fn in [async_generator, functools.partial(async_generator)]:
            with pytest.raises(DefinitionInvalid) as refused:
                register(fn)
            assert str(refused.value) == (
                "Step 'async_generator' is an async generator, which has no result: return a list instead."
            )


# --- defaults and the cache -----------------------------------------------------------------------


def test_only_what_can_be_called_is_a_step() -> None:
    for fn in [5, "pay", StepConfig()]:
        with pytest.raises(DefinitionInvalid) as refused:
            durable_step(fn)
        assert str(refused.value) == f"{fn!r} cannot be a step: decorate a function, or write @durable_step(retries=3)."


def test_defaults_stand_at_the_function_and_leave_it_as_it_is() -> None:
    @durable_step(retries=2, timeout="1 min")
    def ship(order: int) -> int:
        return order + 1

    assert ship(1) == 2
    assert describe_step(ship).config == StepConfig(retries=2, timeout="1 min")
    assert describe_step(functools.partial(ship, 1)).config == StepConfig(retries=2, timeout="1 min")


def test_defaults_of_a_method_hold_for_the_bound_one() -> None:
    class Shop:
        @durable_step(repeat=True)
        def ship(self) -> None: ...

    assert describe_step(Shop().ship).config == StepConfig(repeat=True)


def test_a_wrong_default_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigInvalid):
        durable_step(retries=-1)


def test_a_function_is_looked_at_once_and_forgotten_with_it() -> None:
    def make() -> Any:
        def ship(tx: StepTx) -> Receipt: ...  # type: ignore[empty-body]

        return ship

    fn = make()
    found = describe_step(fn)
    assert describe_step(fn) is found
    assert found.result.is_typed
    watched = weakref.ref(fn)
    del fn
    gc.collect()
    assert watched() is None


def test_closures_with_the_same_return_type_share_its_schema() -> None:
    """Each call of a closure as a step is a new function; building a schema takes longer than the step."""

    def make(type_: Any) -> Any:
        def ship() -> Any: ...

        ship.__annotations__["return"] = type_
        return describe_step(ship).result

    assert make(dict[str, int])._schema is make(dict[str, int])._schema
    assert make(int | str)._schema is not make(str | int)._schema  # pydantic tries the members in order
    unhashable = Annotated[int, [1]]
    assert make(unhashable).decode("1") == 1


def test_a_callable_that_cannot_be_remembered_is_looked_at_each_time() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self) -> None: ...

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    for fn in (Slotted(), Unhashable(), Slotted().__call__):
        assert describe_step(fn).wants_tx is False
