"""Checks the titles of the commits that are not on the base branch yet: `make check` runs it."""

from __future__ import annotations

import subprocess
import sys

LONGEST = 72
BASES = ("origin/main", "main")


def git(*arguments: str) -> str | None:
    """What git prints; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    base = next((name for name in BASES if git("rev-parse", "--verify", "--quiet", name) is not None), None)
    if base is None:
        print(f"Commit titles are not checked: there is no branch {' or '.join(BASES)}.")
        return 0
    if git("merge-base", base, "HEAD") is None:  # a shallow clone: `base..HEAD` would list what the base has
        print(f"Commit titles are not checked: HEAD and {base} have no common commit here.")
        return 0
    lines = (git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") or "").splitlines()
    too_long = [line for line in lines if len(line.partition(" ")[2]) > LONGEST]
    for line in too_long:
        commit, _, title = line.partition(" ")
        print(f"{commit} has {len(title)} characters: {title}")
    if too_long:
        print(f"A commit title has at most {LONGEST} characters. To change it: git rebase --interactive {base}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
