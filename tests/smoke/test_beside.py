"""Workers of earlier code beside workers of today's, on one migrated database: each finishes what the other started."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_durable.store import migrate
from tests.smoke.proc import ROOT, Proc, python, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("broker", ["redis"], indirect=True),
]
_FROZEN = "tests/migration/dumps/0001-postgresql.sql"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    return done.stdout.strip()


def earlier_commits() -> dict[str, str]:
    """The commit that wrote the dumps and so froze the tables, and the commit before today's, if it is a later one."""
    frozen = git("log", "-1", "--format=%H", "--", _FROZEN).splitlines()
    found = {"frozen": frozen[0]} if frozen else {}
    head, previous = git("rev-parse", "HEAD"), git("rev-parse", "--verify", "--quiet", "HEAD~1")
    if frozen and previous and git("merge-base", frozen[0], previous) == frozen[0]:
        found["previous"] = previous
    return {name: commit for name, commit in found.items() if commit != head or name == "frozen"}


EARLIER = earlier_commits()


@pytest.fixture(params=["frozen", "previous"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the package as an earlier commit had it."""
    if request.param not in EARLIER:
        pytest.skip(f"this clone has no {request.param} commit that is older than HEAD; try `git fetch --unshallow`")
    folder = tmp_path / request.param
    folder.mkdir()
    archive = folder / "package.tar"
    subprocess.run(
        ["git", "archive", f"--output={archive}", EARLIER[request.param], "celery_durable"], cwd=ROOT, check=True
    )
    shutil.unpack_archive(archive, folder)
    return folder


class Sides:
    """The application on two versions of the package."""

    def __init__(self, folder: Path, old: Path, environment: dict[str, str]) -> None:
        self.folder, self.packages = folder, {"new": ROOT, "old": old}
        self.environment = environment
        self.procs: list[Proc] = []
        shutil.copy(Path(__file__).with_name("beside.py"), folder / "beside_app.py")

    def worker(self, side: str) -> Proc:
        path = os.pathsep.join([str(self.packages[side]), str(self.folder)])
        check = "import celery_durable, sys; print('package', celery_durable.__file__, flush=True)"
        start = "from celery.__main__ import main; sys.argv = ['celery', *sys.argv[1:]]; main()"
        options = ["-A", "beside_app", "worker", "-c", "2", "-n", f"{side}-{len(self.procs)}@beside", "--loglevel=INFO"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        # -P: the current folder, which has today's package, is not on the path.
        proc = Proc(
            python("-P", "-c", f"{check}; {start}", *options, *quiet),
            log=self.folder / f"{side}-{len(self.procs)}.log",
            env={**self.environment, "BESIDE_SIDE": side, "PYTHONPATH": path, "C_FORCE_ROOT": "1"},
            cwd=self.folder,
        )
        self.procs.append(proc)
        proc.wait_for_log(r"ready\.")
        assert f"package {self.packages[side]}/celery_durable/" in proc.text()
        return proc

    def logs(self) -> str:
        return "\n".join(f"--- {proc.log.name}\n{proc.text()[-3000:]}" for proc in self.procs)


@pytest.fixture
def sides(
    tmp_path: Path,
    earlier: Path,
    store_url: str,
    broker_url: str,
    site_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sides]:
    environment = {"BESIDE_NAME": site_name, "BESIDE_BROKER": broker_url, "BESIDE_DATABASE": store_url}
    for name, value in {**environment, "BESIDE_SIDE": "new"}.items():
        monkeypatch.setenv(name, value)
    sides = Sides(tmp_path, earlier, environment)
    yield sides
    for proc in sides.procs:
        proc.clean_up()


@pytest.fixture
def client(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The workflow, for a process of today's code that creates and reads instances."""
    monkeypatch.syspath_prepend(str(sides.folder))
    application = importlib.import_module("beside_app")
    durable, app = application.durable, application.app
    assert isinstance(app, Celery)
    migrate.check_tables(durable.internals.store)
    yield application.order
    durable.close()
    app.close()
    del sys.modules["beside_app"]


def is_waiting(instance: Any) -> bool:
    return any(step.name == "go" and step.status == "waiting" for step in instance.history().steps)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("first", ["old", "new"])
def test_each_finishes_what_the_other_started(sides: Sides, client: Any, first: str) -> None:
    second = {"old": "new", "new": "old"}[first]
    starting = sides.worker(first)
    instances = [client.create(number, id=f"{first}-{number}") for number in range(6)]
    try:
        for instance in instances:
            until(f"{instance} waits", lambda instance=instance: is_waiting(instance))
        starting.terminate()
        sides.worker(second)
        for number, instance in enumerate(instances):
            instance.send_event("go", number)
        for number, instance in enumerate(instances):
            until(f"{instance} is complete", lambda instance=instance: instance.status().status == "complete")
            assert instance.status().output == {
                "sides": [first, second], "doubled": 2 * number, "mapped": [2, 4], "answer": number,
            }  # fmt: skip
    except AssertionError as error:
        raise AssertionError(f"{error}\n{sides.logs()}") from None


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_both_work_at_the_same_time(sides: Sides, client: Any) -> None:
    sides.worker("old")
    sides.worker("new")
    instances = [client.create(number, id=f"both-{number}") for number in range(20)]
    try:
        for number, instance in enumerate(instances):
            instance.send_event("go", number)
        for number, instance in enumerate(instances):
            until(f"{instance} is complete", lambda instance=instance: instance.status().status == "complete")
            assert (instance.status().output["doubled"], instance.status().output["answer"]) == (2 * number, number)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{sides.logs()}") from None
