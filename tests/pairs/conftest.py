"""One environment for each database, made at its first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pairs.environment import Environment
from tests.support.databases import on_databases


@pytest.fixture(scope="module")
def environments(request: pytest.FixtureRequest) -> Iterator[dict[str, Environment]]:
    made: dict[str, Environment] = {}
    yield made
    for environment in made.values():
        environment.close()


database = on_databases("postgresql", "mariadb")


@pytest.fixture
def environment(database: str, environments: dict[str, Environment], request: pytest.FixtureRequest) -> Environment:
    if database not in environments:
        own = request.getfixturevalue(f"{database}_database")
        environments[database] = Environment(own.url, own.inspector)
    return environments[database]
