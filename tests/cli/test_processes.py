"""`celery -A ... durable ...` as people start it: a process of its own, found through Celery's plug-ins."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest

import celery_durable

CHECKOUT = Path(celery_durable.__file__).parents[1]

SHOP = """
import pathlib, time
from celery import Celery
from celery_durable import Durable, durable_workflow

app = Celery("shop", broker="redis://127.0.0.1:1/0")  # nobody answers there
app.conf.beat_schedule = {"nightly": {"task": "nightly", "schedule": 3600}}
durable = Durable(app)

@durable_workflow(name="order")
def order(event, step):
    step.do("pack", str.upper, "parcel")
    step.log.info("packed", weight=3)
    approval = step.wait_for_event("await approval", "approval")
    return {"by": approval.payload, "order": event.payload["order_id"]}

def hold():
    pathlib.Path("held").touch()
    while pathlib.Path("held").exists():
        time.sleep(0.01)
    return "held"

@durable_workflow(name="hold")
def holding(event, step):
    return [step.do("first", hold), step.do("second", str)]
"""

SLOW_START = """
from celery import bootsteps

class SlowStart(bootsteps.StartStopStep):
    def start(self, worker):
        pathlib.Path("starting").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)

app.steps["worker"].add(SlowStart)

"""

SIGNAL_IN_WAIT = """
import signal, threading

real_wait, signalled = threading.Event.wait, []

def wait(event, timeout=None):
    if threading.current_thread() is threading.main_thread() and timeout is not None and not signalled:
        signalled.append(True)
        with event._cond:  # as wait() itself holds it for some instructions
            signal.raise_signal(signal.SIGINT)
    return real_wait(event, timeout)

threading.Event.wait = wait

"""


class Folder:
    """A folder with an app, and `celery` in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.joinpath("shop.py").write_text(SHOP)
        path.joinpath("plain.py").write_text("from celery import Celery\napp = Celery('plain')\n")
        paths = [str(path), str(CHECKOUT), *sys.path]
        if not any(found.value == "celery_durable.cli:durable" for found in entry_points(group="celery.commands")):
            paths.insert(0, str(_installed(path / "site")))
        dropped = ("CELERY_APP", "APP", "NO_COLOR", "CELERY_BROKER_URL")
        self.env = {key: value for key, value in os.environ.items() if key not in dropped}
        self.env |= {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"}
        self.started: list[subprocess.Popen[str]] = []

    def celery(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "celery", *words)

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=50, check=False
        )

    def start(self, *words: str, run: tuple[str, ...] = ("-m", "celery")) -> subprocess.Popen[str]:
        command = [sys.executable, *run, *words]
        log = self.path.joinpath(f"log-{len(self.started)}").open("w")
        self.started.append(
            subprocess.Popen(command, cwd=self.path, env=self.env, stdout=log, stderr=log, text=True, close_fds=True)
        )
        log.close()
        return self.started[-1]

    def log(self, number: int = 0) -> str:
        return self.path.joinpath(f"log-{number}").read_text()

    def await_log(self, wanted: str, number: int = 0) -> str:
        return self.wait(lambda: wanted in self.log(number) and self.log(number), f"{wanted!r} in the log", number)

    def wait(self, look: Any, what: str, number: int = 0) -> Any:
        end = time.monotonic() + 40
        while not (found := look()):
            assert time.monotonic() < end, f"{what} did not come:\n{self.log(number)}"
            assert self.started[number].poll() is None, f"{what} did not come, and it ended:\n{self.log(number)}"
            time.sleep(0.02)
        return found


def _installed(site: Path) -> Path:
    """Where the package is only on the path: what an installation would tell Celery of it."""
    project = tomllib.loads(CHECKOUT.joinpath("pyproject.toml").read_text())["project"]
    info = site / f"celery_durable-{project['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: celery-durable\nVersion: {project['version']}\n"
    )
    commands = project["entry-points"]["celery.commands"]
    lines = [f"{name} = {target}\n" for name, target in commands.items()]
    info.joinpath("entry_points.txt").write_text("[celery.commands]\n" + "".join(lines))
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for process in folder.started:
        process.kill()
        process.wait()


def test_celery_lists_our_verbs_and_without_an_app_says_how_to_name_one(folder: Folder) -> None:
    done = folder.celery("durable", "ls")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == (
        "error: No Celery app was given, so the database is unknown.\n"
        "hint: Give it before the command: celery -A proj durable ls (or set CELERY_APP=proj)\n"
    )
    assert re.search(r"^ +durable +Run and operate durable workflows\.$", folder.celery("--help").stdout, re.MULTILINE)


@pytest.mark.gate
def test_hints_name_the_app_as_it_was_typed(folder: Folder) -> None:
    done = folder.celery("-A", "shop:app", "durable", "ls")
    assert done.stderr.endswith("SQLite in this directory: celery -A shop:app durable dev\n")
    assert (done.stdout, done.returncode) == ("", 1)
    assert folder.celery("-A", "plain", "durable", "ls").returncode == 1


@pytest.mark.gate
def test_dev_runs_a_workflow_to_its_end_without_any_server(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev")
    assert folder.await_log("Ctrl-C").splitlines()[:7] == [
        "broker      this process's memory   (not redis://127.0.0.1:1/0, your broker_url)",
        "store       ./durable-dev.sqlite   (durable_database_url is not set)",
        "lease       5 s   (durable_lease_seconds is 30)",
        "beat        none   (not run here: nightly)",
        "workflows   hold, order",
        "start one   celery -A shop durable start hold",
        "stop        Ctrl-C",
    ]
    noted = "durable_database_url is not set: using ./durable-dev.sqlite of `durable dev`\n"
    done = folder.celery("-A", "shop", "durable", "start", "order", "-P", "order_id=42", "--id", "o-1")
    assert (done.stdout, done.stderr) == ("o-1\n", noted)
    folder.await_log("await approval")
    done = folder.celery("-A", "shop", "durable", "send-event", "order", "o-1", "approval", "--payload", '"eve"')
    assert done.stdout == "Sent\tapproval\torder/o-1\n"
    said = folder.await_log("run\tcomplete").splitlines()
    times, events = zip(*(line.split("\torder/o-1#1\t") for line in said if "o-1#1" in line), strict=True)
    assert [event.split("\t")[:3] for event in events] == [
        ["step", "completed", "pack"],
        ["log", "info", "packed weight=3"],
        ["step", "waiting", "await approval"],
        ["step", "completed", "await approval"],
        ["run", "complete", ""],
    ]
    assert list(times) == sorted(times)
    checked = folder.celery("-A", "shop", "durable", "doctor")
    assert checked.stderr == noted
    assert "OK\tdatabase\t" in checked.stdout
    assert "OK\tworkers\t1 running: dev@" in checked.stdout
    assert "FAIL" not in checked.stdout
    shown = folder.celery("-A", "shop", "durable", "show", "order", "o-1", "--full").stdout
    assert shown.splitlines()[-1] == 'output\t{"by":"eve","order":"42"}'
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(20) == 0
    assert folder.log().endswith("Stopped. Unfinished instances continue when you start it again.\n")


@pytest.mark.gate
def test_dev_prints_a_start_with_the_parameters_that_the_workflow_needs(folder: Folder) -> None:
    folder.path.joinpath("typed.py").write_text(
        textwrap.dedent("""
        from celery import Celery
        from celery_durable import Durable, Step, WorkflowEvent, durable_workflow
        from pydantic import BaseModel

        app = Celery("typed")
        Durable(app)

        class Order(BaseModel):
            order_id: str
            cents: int
            note: str = ""

        @durable_workflow
        def order(event: WorkflowEvent[Order], step: Step) -> None:
            pass
        """)
    )
    folder.start("-A", "typed", "durable", "dev")
    printed = folder.await_log("Ctrl-C").splitlines()
    assert "start one   celery -A typed durable start order -P order_id=... -P cents:=..." in printed


@pytest.mark.slow
def test_dev_tells_a_run_once_whatever_messages_come_after_its_end(folder: Folder) -> None:
    folder.path.joinpath("doorbell.py").write_text(
        textwrap.dedent("""
        from celery import Celery
        from celery_durable import Durable, durable_workflow
        from celery_durable.model import DueRun, RunRef

        durable = Durable(Celery("doorbell"))

        @durable_workflow(name="visit")
        def visit(event, step):
            return step.do("ring", ring, event.payload)

        def ring(other):
            durable.internals.publisher.publish([DueRun(RunRef("visit", other, 1), durable.internals.settings.queue)])

        app = durable.app
        """)
    )
    folder.start("-A", "doorbell", "durable", "dev")
    folder.await_log("Ctrl-C")
    for name, other in (("first", "nobody"), ("second", "first"), ("third", "nobody")):
        folder.celery("-A", "doorbell", "durable", "start", "visit", "--params", json.dumps(other), "--id", name)
        folder.await_log(f"visit/{name}#1\trun\tcomplete")
    said = [line.split("\t", 1)[1] for line in folder.log().splitlines() if "visit/first#1" in line]
    assert [line.split("\t")[1:3] for line in said] == [["step", "completed"], ["run", "complete"]]


@pytest.mark.gate
def test_dev_stops_after_the_running_step_and_goes_on_when_started_again(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev", "--concurrency", "1")
    folder.await_log("Ctrl-C")
    folder.celery("-A", "shop", "durable", "start", "hold", "--id", "h-1")
    folder.wait(folder.path.joinpath("held").exists, "the step")
    dev.send_signal(signal.SIGINT)
    folder.await_log("Stopping after the current steps. Press Ctrl-C again to stop at once.")
    assert dev.poll() is None
    folder.path.joinpath("held").unlink()
    assert dev.wait(20) == 0
    assert "step\tcompleted\tfirst" in folder.log()
    assert "\tsecond" not in folder.log()

    again = folder.start("-A", "shop", "durable", "dev")
    folder.await_log("run\tcomplete", 1)
    assert "step\tcompleted\tsecond" in folder.log(1)
    assert "first" not in folder.log(1)
    again.send_signal(signal.SIGTERM)
    assert again.wait(20) == 0


@pytest.mark.gate
def test_dev_restarts_after_the_running_step_when_the_code_is_edited(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev")
    folder.await_log("Ctrl-C")
    folder.celery("-A", "shop", "durable", "start", "hold", "--id", "h-1")
    folder.wait(folder.path.joinpath("held").exists, "the step")
    code = folder.path / "shop.py"
    code.write_text(SHOP.replace("return [step.do", "return [step.do("))
    folder.await_log("Not reloaded: ")
    code.write_text(SHOP.replace('step.do("second", str)', 'step.do("second", str.upper, "edited")'))
    folder.await_log("Reloading after the current steps: shop.py changed.")
    assert folder.log().count("start one") == 1
    folder.path.joinpath("held").unlink()
    folder.await_log("run\tcomplete")
    assert folder.log().count("start one") == 2
    shown = folder.celery("-A", "shop", "durable", "show", "hold", "h-1", "--full").stdout
    assert shown.splitlines()[-1] == 'output\t["held","EDITED"]'
    assert dev.poll() is None
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(20) == 0


@pytest.mark.slow
def test_dev_reloads_although_a_file_with_a_mistake_was_deleted(folder: Folder) -> None:
    other = folder.path / "other.py"
    other.write_text("")
    folder.path.joinpath("shop.py").write_text(f"import other\n{SHOP}")
    dev = folder.start("-A", "shop", "durable", "dev")
    folder.await_log("Ctrl-C")
    other.write_text("def (")
    folder.await_log("Not reloaded: ")
    other.unlink()
    folder.path.joinpath("shop.py").write_text(SHOP)
    folder.await_log("Reloading after the current steps: shop.py changed.")
    folder.wait(lambda: folder.log().count("start one") == 2, "the restart")
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(20) == 0


@pytest.mark.slow
def test_dev_ends_although_it_is_stopped_before_its_worker_consumes(folder: Folder) -> None:
    folder.path.joinpath("slow.py").write_text(SHOP.replace("@durable_workflow", SLOW_START + "@durable_workflow", 1))
    dev = folder.start("-A", "slow", "durable", "dev")
    folder.wait(folder.path.joinpath("starting").exists, "the start of the worker")
    dev.send_signal(signal.SIGTERM)
    folder.await_log("Stopping after the current steps.")
    folder.path.joinpath("go").touch()
    assert dev.wait(20) == 0


def test_dev_stops_at_whatever_instruction_the_signal_arrives(folder: Folder) -> None:
    """`Event.set` in a signal handler waits for ever if the interrupted code holds the lock of the event."""
    folder.path.joinpath("shop.py").write_text(SHOP + SIGNAL_IN_WAIT)
    dev = folder.start("-A", "shop", "durable", "dev", "--no-reload")
    folder.await_log("Ctrl-C")
    dev.send_signal(signal.SIGINT)
    assert dev.wait(20) == 0
    assert "Stopping after the current steps." in folder.log()


@pytest.mark.slow
def test_dev_that_is_stopped_or_told_not_to_does_not_reload(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev", "--no-reload")
    folder.await_log("Ctrl-C")
    folder.path.joinpath("shop.py").write_text(SHOP + "\n# edited\n")
    folder.celery("-A", "shop", "durable", "start", "order", "-P", "order_id=42", "--id", "o-1")
    folder.await_log("await approval")
    assert "Reloading" not in folder.log()
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(20) == 0

    again = folder.start("-A", "shop", "durable", "dev")
    folder.await_log("Ctrl-C", 1)
    folder.celery("-A", "shop", "durable", "start", "hold", "--id", "h-1")
    folder.wait(folder.path.joinpath("held").exists, "the step", 1)
    again.send_signal(signal.SIGINT)
    folder.await_log("Stopping after the current steps.", 1)
    folder.path.joinpath("shop.py").write_text(SHOP)
    folder.path.joinpath("held").unlink()
    assert again.wait(20) == 0
    assert "Reloading" not in folder.log(1)


@pytest.mark.slow
def test_dev_that_is_asked_twice_stops_at_once(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev")
    folder.await_log("Ctrl-C")
    folder.celery("-A", "shop", "durable", "start", "hold", "--id", "h-1")
    folder.wait(folder.path.joinpath("held").exists, "the step")
    dev.send_signal(signal.SIGINT)
    folder.await_log("Stopping after the current steps. Press Ctrl-C again to stop at once.")
    dev.send_signal(signal.SIGINT)
    assert dev.wait(20) == 130


@pytest.mark.slow
def test_the_dashboard_serves_until_it_is_stopped(folder: Folder) -> None:
    url = f"sqlite:///{folder.path}/shop.sqlite3"
    with folder.path.joinpath("shop.py").open("a") as file:
        file.write(f"app.conf.durable_database_url = {url!r}\n")
    assert folder.celery("-A", "shop", "durable", "migrate").returncode == 0
    served = folder.start("-A", "shop", "durable", "dashboard", "--port", "0")
    link = re.search(r"http://127\.0\.0\.1:\d+/\w*\?link=\w+", folder.await_log("Ctrl-C"))[0]
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(link).status_code == 200
        assert httpx.get(link).status_code == 401
    served.send_signal(signal.SIGINT)
    assert served.wait(20) in (0, 130)


@pytest.mark.slow
def test_dev_serves_the_dashboard_and_keeps_its_visitor_over_a_reload(folder: Folder) -> None:
    dev = folder.start("-A", "shop", "durable", "dev", "--dashboard")
    link = r"http://127\.0\.0\.1:\d+/\?link=\w+"
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(re.search(link, folder.await_log("Ctrl-C"))[0]).status_code == 200
        with folder.path.joinpath("shop.py").open("a") as file:
            file.write("edited = True\n")
        folder.wait(lambda: len(re.findall(link, folder.log())) == 2 and folder.log().count("Ctrl-C") == 2, "a reload")
        address = re.findall(link, folder.log())[1].partition("?")[0]
        assert browser.get(f"{address}instances").status_code == 200
        assert httpx.get(f"{address}instances").status_code == 401
    dev.send_signal(signal.SIGINT)
    assert dev.wait(30) == 0


@pytest.mark.slow
def test_the_dashboard_of_a_database_needs_no_app(folder: Folder) -> None:
    url = f"sqlite:///{folder.path}/shop.sqlite3"
    with folder.path.joinpath("shop.py").open("a") as file:
        file.write(f"app.conf.durable_database_url = {url!r}\n")
    assert folder.celery("-A", "shop", "durable", "migrate").returncode == 0
    assert folder.celery("-A", "shop", "durable", "start", "order", "--id", "o-1").returncode == 0
    program = "from celery_durable.cli.remote import main; main()"
    folder.start("dashboard", "--database-url", url, "--port", "0", run=("-c", program))
    link = re.search(r"http://127\.0\.0\.1:\d+/\?link=\w+", folder.await_log("Ctrl-C"))[0]
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(link).status_code == 200
        page = browser.get(link.partition("?")[0] + "workflows/order/instances/o-1").text
    assert "order/o-1" in page
    assert 'method="post"' not in page
