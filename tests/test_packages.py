"""Workflows that packages bring: registered by hand, found in modules and by entry points, clashes refused."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent, WorkflowNotFound, durable_workflow, packages
from celery_durable.errors import BindingKeyTaken, DefinitionInvalid, ValueRefused, WorkflowNameTaken

SOURCE = """
from celery_durable import durable_workflow

@durable_workflow(name={name!r})
def flow(event, step):
    return {name!r}

required_workflows = {{{key!r}: flow}}
"""


@pytest.fixture
def durable() -> Durable:
    return Durable(Celery("composed", broker="memory://", set_as_current=False))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a package with a module `workflows`, importable for the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(name: str, source: str | None) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        if source is not None:
            (folder / "workflows.py").write_text(source)
        made.append(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)
        sys.modules.pop(f"{name}.workflows", None)


def flow(event: WorkflowEvent, step: Step) -> None:
    """A workflow."""


def other(event: WorkflowEvent, step: Step) -> None:
    """Another."""


def test_a_workflow_has_a_binding_key_beside_its_name(durable: Durable) -> None:
    order = durable_workflow(name="order")(flow)
    durable.register({"ORDER": order})
    durable.register({"ORDER": order})  # once more changes nothing
    assert durable.workflows.ORDER.name == durable.workflows["order"].name == "order"
    with pytest.raises(AttributeError) as caught:
        _ = durable.workflows.ODER
    assert str(caught.value) == "No workflow is registered under binding key 'ODER' (registered: ORDER)."


def test_a_binding_key_that_is_taken_is_refused_with_both_places(durable: Durable) -> None:
    durable.register({"ORDER": durable_workflow(name="order")(flow)})
    with pytest.raises(BindingKeyTaken) as caught:
        durable.register({"OTHER": durable_workflow(name="a")(flow), "ORDER": durable_workflow(name="b")(other)})
    assert str(caught.value) == (
        "Binding key 'ORDER' is already taken by tests.test_packages.flow; register "
        "tests.test_packages.other under another: durable.register({...})."
    )
    assert list(durable.internals.bindings) == ["ORDER"]  # all or none


def test_a_name_that_is_taken_is_refused_with_both_modules(durable: Durable, package) -> None:
    package("billing_one", SOURCE.format(name="invoice", key="INVOICE"))
    package("billing_two", SOURCE.format(name="invoice", key="BILL"))
    with pytest.raises(WorkflowNameTaken) as caught:
        durable.autodiscover(["billing_one", "billing_two"], with_entry_points=False)
    assert str(caught.value) == (
        "Workflow name 'invoice' is already taken by billing_one.workflows.flow; billing_two.workflows.flow needs "
        "another: @durable_workflow(name=...)."
    )


@pytest.mark.parametrize("key", ["", "two words", "1st", "_private", "keys", "get"])
def test_a_key_that_python_code_cannot_write_is_refused(durable: Durable, key: str) -> None:
    with pytest.raises(DefinitionInvalid) as caught:
        durable.register({key: durable_workflow(name="order")(flow)})
    assert str(caught.value) == (
        f"Binding key {key!r} of workflow 'order' cannot be used: write an identifier, such as ORDER, that is no "
        "method of a dict."
    )


def test_what_is_no_workflow_is_refused(durable: Durable) -> None:
    with pytest.raises(DefinitionInvalid, match="under key 'ORDER' is no workflow: decorate it with"):
        durable.register({"ORDER": flow})  # type: ignore[dict-item]
    with pytest.raises(DefinitionInvalid, match="cannot be registered: pass a dict of binding keys and workflows"):
        durable.register([flow])  # type: ignore[arg-type]


def test_packages_are_searched_for_their_workflows(durable: Durable, package) -> None:
    package("shop_orders", SOURCE.format(name="shop-order", key="SHOP_ORDER"))
    package("shop_pages", None)  # has none
    durable.autodiscover(["shop_orders", "shop_pages"], with_entry_points=False)
    assert durable.workflows.SHOP_ORDER.name == "shop-order"


def test_an_import_that_fails_inside_is_told(durable: Durable, package) -> None:
    package("shop_broken", "import surely_not_installed")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        durable.autodiscover(["shop_broken"], with_entry_points=False)


@pytest.mark.parametrize("packages", ["shop", b"shop", 5, None])
def test_the_packages_to_look_in_are_a_list(durable: Durable, packages: Any) -> None:
    with pytest.raises(ValueRefused) as refused:
        durable.autodiscover(packages, with_entry_points=False)
    assert str(refused.value) == f"packages={packages!r} cannot be used: pass a list of import names, such as ['shop']."


@pytest.mark.parametrize("value", ["shop_plugin.workflows:required_workflows", "shop_plugin.workflows"])
def test_installed_packages_announce_theirs_as_entry_points(
    durable: Durable, package, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    package("shop_plugin", SOURCE.format(name="plugged", key="PLUGGED"))
    found = EntryPoints([EntryPoint("shop", value, packages.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(packages, "entry_points", lambda group: found.select(group=group))
    with pytest.raises(WorkflowNotFound):
        _ = durable.workflows["plugged"]
    durable.autodiscover()
    assert durable.workflows.PLUGGED.name == "plugged"


def test_an_entry_point_that_leads_nowhere_is_named(durable: Durable, package, monkeypatch) -> None:
    package("shop_empty", "x = 1")
    found = EntryPoints([EntryPoint("shop", "shop_empty.workflows", packages.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(packages, "entry_points", lambda group: found)
    with pytest.raises(DefinitionInvalid) as caught:
        durable.autodiscover()
    assert str(caught.value) == (
        "Entry point shop = shop_empty.workflows of group celery_durable.workflows is no dict of workflows, and no "
        "module with one called required_workflows."
    )
