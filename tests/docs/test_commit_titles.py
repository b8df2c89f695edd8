"""`make check` judges the titles of the commits that are not on the base branch yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

FITS = "errors: " + "x" * 64
TOO_LONG = "errors: " + "x" * 65

# A git hook names its own repository in GIT_DIR; the configuration of the user who runs the tests may sign commits.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
    "PYTHONPATH": str(ROOT),
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


class Repository:
    """A git repository of the test's own; each call of `commit` is one empty commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.com"]
        command = ["git", *identity, *arguments]
        subprocess.run(command, cwd=self.folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=30)

    def commit(self, title: str) -> None:
        self.git("commit", "--quiet", "--allow-empty", "--message", title)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "project")
    repository.commit(TOO_LONG)  # on the base branch: too late to change
    return repository


def check(folder: Path) -> tuple[int, str]:
    """The exit code and the output of the check in this folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.commit_titles"],
        cwd=folder,
        env=ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_title_of_72_characters_passes(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit(FITS)
    assert check(repository.folder) == (0, "")


def test_a_title_of_73_characters_fails_and_is_named(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit(TOO_LONG)
    repository.commit(FITS)
    code, output = check(repository.folder)
    assert code == 1
    first, *rest = output.splitlines()
    assert first.endswith(f" 73 characters: {TOO_LONG}")
    assert rest == ["A commit title has at most 72 characters. To change it: git rebase --interactive main"]


def test_characters_count_and_not_bytes(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit("docs: " + "ü" * 66)
    assert check(repository.folder) == (0, "")


def test_commits_on_the_base_branch_are_not_judged(repository: Repository) -> None:
    assert check(repository.folder) == (0, "")


def test_the_base_is_the_remote_branch_if_there_is_one(repository: Repository, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", str(repository.folder), str(clone))
    repository.folder = clone
    repository.commit(TOO_LONG)  # on main, but not pushed
    code, output = check(clone)
    assert (code, output.splitlines()[-1].rpartition(" ")[2]) == (1, "origin/main")


def test_a_merge_commit_is_not_judged(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit(FITS)
    repository.git("switch", "--quiet", "--create", "merged", "main")
    repository.git("merge", "--quiet", "--no-ff", "--message", f"Merge {'a' * 40} into {'b' * 40}", "work")
    assert check(repository.folder) == (0, "")


def test_a_shallow_clone_without_the_common_commit_passes_and_says_so(repository: Repository, tmp_path: Path) -> None:
    repository.git("switch", "--quiet", "--create", "work")
    repository.commit(FITS)
    repository.commit(TOO_LONG)
    clone = tmp_path / "clone"
    url = repository.folder.as_uri()
    repository.git("clone", "--quiet", "--depth=1", "--no-single-branch", "--branch=work", url, str(clone))
    assert check(clone) == (0, "Commit titles are not checked: HEAD and origin/main have no common commit here.\n")


def test_a_branch_without_a_base_passes_and_says_so(repository: Repository) -> None:
    repository.git("branch", "--move", "elsewhere")
    assert check(repository.folder) == (0, "Commit titles are not checked: there is no branch origin/main or main.\n")


def test_a_folder_without_git_passes_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "unpacked").mkdir()
    expected = "Commit titles are not checked: there is no branch origin/main or main.\n"
    assert check(tmp_path / "unpacked") == (0, expected)
