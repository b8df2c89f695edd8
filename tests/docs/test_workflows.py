"""CI runs what it names: actions by commit, images by digest, and every version that the project promises."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

import noxfile
from tests.chaos.arena import PAIRS
from tests.docs.blocks import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def used(text: str) -> list[str]:
    """What the steps of a workflow use, with the comment behind it."""
    return re.findall(r"^ *(?:- )?uses: (.+)$", text, re.MULTILINE)


def jobs(workflow: str) -> dict:
    return yaml.safe_load((GITHUB / "workflows" / workflow).read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_of_others_are_named_by_commit_and_version(path) -> None:
    lines = used(path.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        if line.startswith("./"):
            assert (ROOT / line / "action.yml").exists(), line
        else:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_version() -> None:
    lines = {line for path in WORKFLOWS for line in used(path.read_text(encoding="utf-8")) if not line.startswith("./")}
    actions = [line.partition("@")[0] for line in lines]
    assert sorted(actions) == sorted(set(actions))


def test_images_are_named_by_tag_and_digest() -> None:
    compose = re.findall(r"^ +image: (.+)$", (ROOT / "docker-compose.yml").read_text(encoding="utf-8"), re.MULTILINE)
    built = re.findall(r"^FROM (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    foreign = [image for image in [*compose, *built] if image != "celery-durable-example"]
    assert len(foreign) == 5
    for image in foreign:
        assert re.fullmatch(r"\w+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_every_night_each_python_of_the_noxfile_has_a_job() -> None:
    assert jobs("nightly.yml")["tests"]["strategy"]["matrix"]["python"] == noxfile.PYTHONS


def test_every_night_runs_a_million_schedules_and_all_slow_tests_and_each_pair_of_servers() -> None:
    nightly = jobs("nightly.yml")
    (simulate,) = [step["run"] for step in nightly["schedules"]["steps"] if "run" in step]
    found = re.search(r" N=(\d+) SEED=\$\(\(GITHUB_RUN_NUMBER \* 1000000 \+ SHARD \* (\d+)\)\) ", simulate)
    assert found is not None
    shards = nightly["schedules"]["strategy"]["matrix"]["shard"]
    assert shards == list(range(len(shards)))
    assert found[1] == found[2]
    assert len(shards) * int(found[1]) == 1_000_000

    shards = nightly["slow"]["strategy"]["matrix"]["shard"]
    assert shards == list(range(1, len(shards) + 1))
    assert nightly["slow"]["env"]["DURABLE_SHARD"] == f"${{{{ matrix.shard }}}}/{len(shards)}"
    assert nightly["chaos"]["strategy"]["matrix"]["pair"] == list(PAIRS)


def test_the_noxfile_begins_with_the_lowest_versions_that_the_package_accepts() -> None:
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in PROJECT["dependencies"])
    assert next(iter(noxfile.CELERY.values())) == f"~={lowest['celery']}.0"
    assert next(iter(noxfile.SQLALCHEMY.values())) == f"~={lowest['sqlalchemy']}"
    assert PROJECT["requires-python"] == f">={noxfile.PYTHONS[0]}"


def test_only_the_job_that_publishes_may_do_so() -> None:
    release = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert release["permissions"] == {}
    assert {name for name, job in release["jobs"].items() if "environment" in job} == {"pypi"}
    assert release["jobs"]["pypi"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize("path", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.name)
def test_a_form_for_issues_can_be_read(path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        return
    assert form["name"]
    assert form["description"]
    assert all(part["type"] == "markdown" or part["attributes"]["label"] for part in form["body"])


def test_the_form_for_bugs_asks_for_the_doctor_and_for_versions() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    asked = {part["id"]: part for part in form["body"] if "id" in part}
    assert asked["doctor"]["attributes"]["label"] == "Output of `celery -A proj durable doctor`"
    assert asked["doctor"]["validations"]["required"] is True
    assert asked["versions"]["validations"]["required"] is True
