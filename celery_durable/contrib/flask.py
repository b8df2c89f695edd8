"""Flask: workflows in an application factory. Needs ``celery-durable[flask]``.

The body of each step runs in an app context of its own, on the thread that calls it, so that extensions work as in a
request. With Flask-SQLAlchemy, `db.session` in a step that takes `StepTx` is the session that commits with the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http import HTTPStatus
from importlib.metadata import entry_points
from typing import Any

import click
from celery import Celery, Task
from flask import Blueprint, Flask, Response, current_app, g, has_app_context, request
from flask.blueprints import BlueprintSetupState
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response as BaseResponse

from celery_durable import signals
from celery_durable.app import Durable
from celery_durable.config import Settings
from celery_durable.errors import ConfigInvalid, DurableError, NotConfigured
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.wire.encoding import to_json
from celery_durable.wire.responses import Problem, describe_refusal

__all__ = ["FlaskDurable"]

_KEY = "celery_durable"
_CONFIG_PREFIX = "DURABLE_"


class FlaskDurable:
    """Adds durable workflows to a Flask application.

    Write ``FlaskDurable(app, db=db)``, or ``FlaskDurable(db=db)`` and later ``init_app(app)`` in the factory. The
    Celery app is ``app.extensions["celery"]``. If there is none, it is made from ``app.config["CELERY"]``, and its
    tasks run in an app context. A key ``DURABLE_X`` of the configuration becomes the setting ``durable_x``.

    Args:
        app: The Flask application. None: call `init_app` later.
        db: Your ``SQLAlchemy`` of Flask-SQLAlchemy, whose database has the workflows. None: ``DURABLE_DATABASE_URL``
            names the database, and steps get plain sessions.
    """

    def __init__(self, app: Flask | None = None, *, db: Any = None) -> None:
        self._db = db
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Attach to an application.

        It gets ``flask durable``, and answers errors of this package as the HTTP API does.

        Args:
            app: The application. Call this after ``db.init_app(app)``.

        Raises:
            ConfigInvalid: The application has been attached already, or its Celery app has a Durable.
        """
        if _KEY in app.extensions:
            raise ConfigInvalid("app", app, "FlaskDurable is attached to this application already")
        celery = app.extensions.get("celery") or _make_celery(app)
        names = {key.lower(): key for key in app.config if key.startswith(_CONFIG_PREFIX)}
        for name, key in names.items():
            celery.conf[name] = app.config[key]
        durable = Durable()
        durable.internals.setting_names = names
        durable.init_app(celery)
        app.extensions[_KEY] = durable
        durable.internals.runtime.pass_context = app.app_context
        if self._db is not None and celery.conf.get("durable_database_url") is None:
            durable.internals.make_store = functools.partial(_make_store, app, self._db)
        signals.around_step.connect(_make_body_context)
        app.register_error_handler(DurableError, _answer)
        app.cli.add_command(_make_command(celery))

    def dashboard(self, **options: Any) -> Blueprint:
        """Return the dashboard as a blueprint: ``app.register_blueprint(..., url_prefix="/durable")``.

        The hooks are called in the request's context, so they may use `flask.session` and `flask.g`. It requires the
        extra ``dashboard``. Register it after `init_app`.

        Args:
            **options: The keyword arguments of `celery_durable.dashboard.dashboard`.

        Raises:
            NoAuthorization: There is no hook, and ``allow_anonymous`` is not set; or both are given.
        """
        made = Blueprint("celery_durable_dashboard", __name__)
        made.record(functools.partial(_add_pages, options))
        return made

    @property
    def durable(self) -> Durable:
        """The `Durable` of the current application.

        Raises:
            NotConfigured: There is no app context, or its application was not attached.
        """
        return _find_durable(current_app if has_app_context() else None)


def _find_durable(app: Flask | None) -> Durable:
    found = None if app is None else app.extensions.get(_KEY)
    if not isinstance(found, Durable):
        remedy = (
            "Use it in an app context, `with app.app_context():`, of an application to which init_app(app) has "
            "attached one."
        )
        raise NotConfigured("FlaskDurable.durable", remedy)
    return found


def _make_celery(app: Flask) -> Celery:
    """Make the Celery app as Flask's documentation does."""

    class FlaskTask(Task):  # type: ignore[type-arg]  # generic in its stubs alone
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with app.app_context():
                return self.run(*args, **kwargs)

    celery: Celery = Celery(app.name, task_cls=FlaskTask)
    celery.config_from_object(app.config.get("CELERY", {}))
    celery.set_default()
    app.extensions["celery"] = celery
    return celery


# --- app contexts -------------------------------------------------------------------------------


def _make_body_context(**_: Any) -> AbstractContextManager[None]:
    """Make the context of a body, on the thread of the pass. The body may run on another thread."""
    # current_app is a proxy: on the other thread it would be none.
    return _body_context(current_app._get_current_object()) if has_app_context() else nullcontext()  # type: ignore[attr-defined]  # noqa: SLF001


@contextmanager
def _body_context(app: Flask) -> Iterator[None]:
    with app.app_context():
        try:
            yield
        finally:
            # The pass commits the step's session after the body. The end of the context would close it.
            registry = g.pop(_KEY, None)
            if registry is not None:
                registry.clear()


# --- Flask-SQLAlchemy ---------------------------------------------------------------------------


def _make_store(app: Flask, db: Any, settings: Settings, runtime: Runtime) -> Store:
    """Make a store on the engine of Flask-SQLAlchemy, whose steps write with `db.session`."""
    with app.app_context():
        engine = db.engine
    store = Store(
        engine=engine,
        session_factory=functools.partial(_open_session, db),
        schema=settings.database_schema,
        prefix=settings.table_prefix,
        prepared_statements=settings.prepared_statements,
        runtime=runtime,
    )
    store.sessions.opens_before_body = True
    return store


def _open_session(db: Any) -> Session:
    """Open the session of a step, and make it `db.session` of the body's app context."""
    session: Session = db.session.session_factory()
    if has_app_context() and not db.session.registry.has():  # else the body has used db.session for itself
        db.session.registry.set(session)
        setattr(g, _KEY, db.session.registry)
    return session


# --- the dashboard ------------------------------------------------------------------------------


def _add_pages(options: Mapping[str, Any], state: BlueprintSetupState) -> None:
    """Add the pages of the dashboard to the application that registers the blueprint."""
    from celery_durable.dashboard import dashboard  # noqa: PLC0415  # it needs another extra
    from celery_durable.dashboard.wsgi import WsgiPages  # noqa: PLC0415

    pages: Any = WsgiPages(dashboard(_find_durable(state.app), **options))  # type: ignore[arg-type]  # Flask names its base

    def serve(path: str = "") -> BaseResponse:
        # The prefix of the blueprint is a part of the root, as that of a mounted application is.
        full = request.environ["PATH_INFO"]
        prefix = full.removesuffix(path.encode().decode("latin-1")).rstrip("/")
        root = request.environ.get("SCRIPT_NAME", "") + prefix
        environ = {**request.environ, "SCRIPT_NAME": root, "PATH_INFO": full[len(prefix) :]}
        return Response.from_app(pages, environ)

    for name, rule in (("home", "/"), ("page", "/<path:path>")):
        state.add_url_rule(rule, name, serve, methods=["GET", "POST"])


# --- commands and errors ------------------------------------------------------------------------


class _Context:
    """What ``celery`` passes to the commands of a plugin. ``name`` is what the user types before the verb."""

    name = "flask durable"
    no_color = False

    def __init__(self, app: Celery) -> None:
        self.app = app


def _make_command(celery: Celery) -> click.Command:
    """Make ``flask durable``, which hands its arguments over to the command line of this package."""
    unparsed: Mapping[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}

    @click.command("durable", context_settings=dict(unparsed), help="Run and operate durable workflows.")
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def durable(arguments: tuple[str, ...]) -> None:
        [entry] = entry_points(group="celery.commands", name="durable")
        entry.load().main(args=list(arguments), prog_name="flask durable", obj=_Context(celery))

    return durable


def _answer(error: DurableError) -> Response:
    """Answer a refusal with a problem (RFC 9457). Other errors are the application's to log."""
    if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error
    status, message = HTTPStatus(error.http_status), describe_refusal(error)
    problem = Problem(title=status.phrase, status=status, detail=message, code=error.code, message=message)
    return Response(to_json(problem), status, mimetype="application/problem+json")
