"""The versions that this library promises to run with. `.github/workflows/nightly.yml` runs all sessions every night.

One session is one environment. Arguments after `--` go to pytest:

    .venv/bin/nox --list
    .venv/bin/nox --python 3.11
    .venv/bin/nox --session "tests-3.11(celery='5.5', sqlalchemy='2.0')" -- tests/values -k durations
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# The lowest versions are those of pyproject.toml. "newest" has no upper bound, so it includes tomorrow's release.
CELERY = {"5.5": "~=5.5.0", "5.6": "~=5.6.0", "newest": ">=5.7"}
SQLALCHEMY = {"2.0": "~=2.0.36", "2.1": "~=2.1.0"}
SHOWN = ("celery", "kombu", "sqlalchemy", "alembic", "pydantic", "redis", "psycopg", "pymysql")

DJANGO = {"4.2": "~=4.2.0", "5.2": "~=5.2.0", "newest": ">=6.0"}

_SHOW_VERSIONS = """
import sys
from importlib.metadata import version
print("python " + sys.version.split()[0], *(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")
"""


@nox.session(python=PYTHONS)
@nox.parametrize("sqlalchemy", list(SQLALCHEMY))
@nox.parametrize("celery", list(CELERY))
def tests(session: nox.Session, celery: str, sqlalchemy: str) -> None:
    """Run the tests of `make test` with one Celery and one SQLAlchemy."""
    constraints = Path(session.virtualenv.location) / "constraints.txt"
    constraints.write_text(f"celery{CELERY[celery]}\nsqlalchemy{SQLALCHEMY[sqlalchemy]}\n", encoding="utf-8")
    session.install("--constraint", str(constraints), "--editable", ".[all,dev]")
    session.run("python", "-c", _SHOW_VERSIONS, *SHOWN, silent=False)
    jobs = os.environ.get("JOBS", "2")
    session.run("python", "-m", "pytest", "-n", jobs, "--dist", "worksteal", "-m", "not slow", *session.posargs)


@nox.session(python="3.12")
@nox.parametrize("django", list(DJANGO))
def django_versions(session: nox.Session, django: str) -> None:
    """Run the tests of the integration with one Django."""
    session.install("--editable", ".[all,dev]")
    session.install(f"django{DJANGO[django]}")
    session.run("python", "-c", _SHOW_VERSIONS, *SHOWN, "django", silent=False)
    session.run(
        "python", "-m", "pytest", "tests/contrib/django", "tests/examples/test_django_shop.py", *session.posargs
    )
