"""A stage for each database, made when first wanted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pairs.stage import Stage


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest) -> Iterator[dict[str, Stage]]:
    made: dict[str, Stage] = {}
    yield made
    for stage in made.values():
        stage.close()


@pytest.fixture(params=["postgresql", "mariadb"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stage(database: str, stages: dict[str, Stage], request: pytest.FixtureRequest) -> Stage:
    if database not in stages:
        caretaker = request.getfixturevalue(f"{database}_database")
        stages[database] = Stage(caretaker.engine.url.render_as_string(hide_password=False))
    return stages[database]
