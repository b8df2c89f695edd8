"""How the documentation is built: `make docs`."""

import os
from html import escape
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from celery_durable.http.__main__ import text as describe_api

project = "celery_durable"
author = "The celery_durable authors"
copyright = "2026, The celery_durable authors"
release = version_of("celery-durable")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # annotations name classes of other libraries, which have no pages here
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"celery_durable {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "/")
html_show_sphinx = False

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

suppress_warnings = ["ref.python"]  # an error is documented in two modules that export it

KEYWORDS = {
    "agents": ["coding agent", "llms.txt", "skill"],
    "explanation/comparison": ["temporal", "dbos", "hatchet", "restate", "prefect", "inngest", "alternatives"],
    "explanation/events": ["sleep", "event", "signal a workflow", "topic"],
    "explanation/failures": ["retry", "retries", "timeout", "backoff"],
    "explanation/guarantees": ["exactly once", "at least once", "guarantee", "limits"],
    "explanation/instances": ["labels", "terminate", "pause", "status"],
    "explanation/progress": ["progress", "log"],
    "explanation/transactions": ["transaction", "idempotency", "outbox", "session"],
    "how-to/approvals": ["approval", "human in the loop", "magic link"],
    "how-to/cancel": ["cancel", "clean up", "stop a workflow"],
    "how-to/ci": ["continuous integration", "github actions"],
    "how-to/change-workflows": ["versioning", "replay a run", "preflight", "deploy a change"],
    "how-to/coming-from-celery": ["chain", "group", "eta", "beat", "cron", "schedule", "canvas"],
    "how-to/databases": ["pgbouncer", "mariadb", "mysql", "postgresql", "sqlite", "connections", "replica"],
    "how-to/debugging": ["stuck", "hangs", "not moving", "explain", "error messages"],
    "how-to/deploy": ["deploy", "kubernetes", "docker", "systemd", "production"],
    "how-to/django": ["django", "atomic", "admin", "orm"],
    "how-to/existing-app": ["install", "dispatcher", "worker", "queue"],
    "how-to/fan-out": ["fan out", "map", "child workflow", "task"],
    "how-to/fastapi": ["fastapi", "async", "asyncio"],
    "how-to/fix-chord": ["chord"],
    "how-to/fix-countdown": ["countdown"],
    "how-to/fix-enqueue": ["on_commit", "enqueue"],
    "how-to/flask": ["flask"],
    "how-to/leave": ["uninstall", "remove", "off switch"],
    "how-to/observability": [
        "monitoring",
        "sentry",
        "prometheus",
        "grafana",
        "opentelemetry",
        "metrics",
        "tracing",
        "flower",
    ],
    "how-to/outages": ["outage", "failover", "redis", "rabbitmq", "broker"],
    "how-to/redaction": ["redaction", "secrets", "gdpr"],
    "how-to/repeat": ["restart", "rewind", "fork", "skip a step"],
    "how-to/retention": ["delete", "prune", "retention", "cleanup"],
    "how-to/testing": ["test", "pytest", "mock", "harness"],
    "how-to/undo": ["undo", "saga", "compensation", "rollback"],
    "how-to/tune": ["performance", "concurrency", "prefetch"],
    "how-to/upgrade": ["upgrade", "migration", "alembic"],
    "how-to/webhooks": ["webhook"],
    "reference/cli": ["command line", "cli"],
    "reference/http": ["rest api", "http", "openapi"],
    "reference/settings": ["settings", "configuration"],
    "reference/support": ["supported versions", "roadmap", "compatibility"],
    "tutorial/first-workflow": ["quickstart", "getting started"],
}
"""Words that lead to a page first: the search lists entries of the index before pages that contain the word."""


def write_openapi(app: Sphinx) -> None:
    """Write the description of the HTTP API, which reference/http offers for download."""
    Path(app.srcdir, "reference", "openapi.json").write_text(describe_api(), encoding="utf-8")


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Offer the page for coding agents where they look for it."""
    if error is None:
        Path(app.outdir, "llms.txt").write_bytes(Path(app.srcdir, "agents.md").read_bytes())


def add_keywords(app: Sphinx, doctree: nodes.document) -> None:
    """Make the keywords of a page main entries of the index."""
    words = KEYWORDS.get(app.env.current_document.docname, [])
    if words:
        doctree.insert(0, addnodes.index(entries=[("single", word, "", "main", None) for word in words]))


def add_metatags(_: Sphinx, page: str, __: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Describe a page to search engines and in links that people share."""
    text = next((each.astext() for each in doctree.findall(nodes.paragraph)), "") if doctree is not None else ""
    tags = {
        "og:type": "website",
        "og:site_name": project,
        "og:title": f"{context.get('title', project)} - {project}",
        "og:description": text[:200],
        "og:image": f"{html_baseurl}_static/card.png",
        "twitter:card": "summary_large_image",
    }
    context["metatags"] = context.get("metatags", "") + "".join(
        f'<meta property="{name}" content="{escape(value)}">' for name, value in tags.items()
    )
    context["metatags"] += f'<meta name="description" content="{escape(text[:200])}">'
    if page == "404":  # a server sends it for any address, so its style needs an absolute one
        context["metatags"] = f'<base href="{html_baseurl}">' + context["metatags"]


def setup(app: Sphinx) -> None:
    """Connect the hooks of the build."""
    app.connect("builder-inited", write_openapi)
    app.connect("doctree-read", add_keywords)
    app.connect("html-page-context", add_metatags)
    app.connect("build-finished", write_llms_txt)
