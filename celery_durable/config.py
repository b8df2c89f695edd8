"""The ``durable_*`` settings of a Celery app, read once into one frozen Settings, limits included."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, get_args

from celery_durable.errors import ConfigInvalid, NameInvalid, SettingUnknown
from celery_durable.model import OnLost
from celery_durable.values import UNSET, PayloadLimits, StepConfig, StepPolicy, Tracebacks, check_text_name

Dispatcher = Literal["beat", "worker", "both", "none"]
Switch = bool | Callable[[], bool]
"""A setting that may change while processes run: a function is asked each time."""

logger = logging.getLogger("celery_durable")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its default. A field ``x`` is set as ``app.conf.durable_x``; lengths of time in seconds."""

    database_url: str | None = None
    """Where workflows live, as an SQLAlchemy URL. Needed unless Durable got ``engine=``."""
    read_database_url: str | None = None
    """A replica of that database, for lists and counts. None: they read from the database itself."""
    database_schema: str | None = None
    """The database schema of the package's tables. None: the connection's default."""
    table_prefix: str = ""
    """The prefix of the names of the package's tables."""
    prepared_statements: bool = True
    """Set it to False behind PgBouncer in transaction mode."""

    create_enabled: Switch = True
    """Whether new instances are accepted."""
    execution_enabled: Switch = True
    """Whether workers take runs and dispatchers send messages. Running passes end at their next step boundary."""

    queue: str = "durable"
    dispatcher: Dispatcher = "beat"
    """Which processes find due work: ``celery beat``, each ``celery worker``, both, or none."""
    poll_seconds: float = 0.25
    """How long the dispatcher sleeps at most; it wakes earlier for work that is due earlier."""
    sweep_batch: int = 500
    queue_high_water: int = 10_000
    """The dispatcher publishes nothing to a queue with more messages than this."""
    grace_seconds: float = 2.0
    """How long a published message may take before a sweep checks whether a worker has taken it."""
    redispatch_max_seconds: float = 1800.0
    """A message that no worker takes is sent again when its queue shows that it is lost, or else after this long."""
    redispatch_seconds: float = 15.0
    """How soon outbound events are offered again, and what a tick took; doubling up to `redispatch_max_seconds`."""

    lease_seconds: float = 30.0
    """How long a claim stays valid without renewal. The worker renews it after every third of this time."""
    stall_seconds: float | None = None
    """A pass that makes no progress for this long, outside of your code, loses its claim. None: `lease_seconds`."""
    pass_seconds: float = 60.0
    """A pass that has run longer than this releases its run at the next step boundary, so that others can run."""
    max_crashes: int = 5
    """After this many consecutive crashes of workers, the instance ends as WorkerCrashLoop."""
    unknown_workflow_seconds: float = 5.0
    """How soon an instance is tried again after it reached a worker without the workflow's code."""
    task_on_lost: OnLost = "resend"
    """What happens to a Celery task of a step that is lost with its worker or queue: ``resend``, ``fail`` or ``wait``
    for its timeout. A step can override it."""
    lost_limit: int = 3
    """A task that is lost this many times ends as TaskLost."""
    worker_lost_seconds: float = 10.0
    """A worker that does not report for this long counts as dead, and the tasks of steps that it holds as lost."""

    answer_key: str | None = dataclasses.field(default=None, repr=False)
    """The secret that signs links to questions (`Durable.sign_answer`): 32 characters or more. None: no links."""

    retention_seconds: float | None = None
    """How long an instance is kept after its end. None: forever. A workflow can override it."""

    tracebacks: Tracebacks = "full"
    """What is stored of a failed attempt's traceback: ``full``, ``author`` (no frames of libraries) or ``none``."""

    failed_runs_fail_tasks: bool = False
    """Whether the Celery task of the pass in which a run fails is marked as failed, so that monitors show it red."""

    step_defaults: StepConfig | None = None
    max_steps: int = 1024
    max_payload_bytes: int = 1024 * 1024
    max_map_result_bytes: int = 32 * 1024 * 1024
    max_payload_depth: int = 64
    max_sleep_seconds: float = 365 * 86400.0
    max_workflow_name: int = 64
    max_instance_id: int = 100
    max_event_type: int = 100
    max_step_name: int = 256
    max_log_message: int = 2048
    max_log_category: int = 64
    max_logs: int = 10_000
    max_batch: int = 1_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        for name, (most, why) in _BOUNDS.items():
            if (value := getattr(self, name)) > most:
                raise ConfigInvalid(f"durable_{name}", value, why)
        try:
            check_text_name("The queue", self.queue, 255)
        except NameInvalid:
            remedy = "use text of 1 to 255 characters without control characters"
            raise ConfigInvalid("durable_queue", self.queue, remedy) from None
        if self.answer_key is not None and len(self.answer_key) < MIN_KEY_LENGTH:
            raise ConfigInvalid("durable_answer_key", f"<{len(self.answer_key)} characters>", KEY_REMEDY)
        if self.worker_lost_seconds < _MIN_WORKER_LOST_SECONDS:
            remedy = f"use at least {_MIN_WORKER_LOST_SECONDS}: a worker reports every two seconds"
            raise ConfigInvalid("durable_worker_lost_seconds", self.worker_lost_seconds, remedy)
        if not _TABLE_PREFIX.fullmatch(self.table_prefix):
            remedy = "use up to 33 characters, without %, ` and control characters"
            raise ConfigInvalid("durable_table_prefix", self.table_prefix, remedy)
        if "%" in (self.database_schema or ""):  # SQLAlchemy doubles it, also where it must not
            raise ConfigInvalid("durable_database_schema", self.database_schema, "use a schema without % in its name")

    @property
    def is_create_enabled(self) -> bool:
        """Whether new instances are accepted now."""
        return _is_on("durable_create_enabled", self.create_enabled)

    @property
    def is_execution_enabled(self) -> bool:
        """Whether workers take runs now. It is read at every step boundary."""
        return _is_on("durable_execution_enabled", self.execution_enabled)

    @property
    def lease(self) -> timedelta:
        """How long a claim stays valid without renewal."""
        return timedelta(seconds=self.lease_seconds)

    @property
    def stall(self) -> timedelta:
        """How long a pass may make no progress outside of the user's code."""
        return self.lease if self.stall_seconds is None else timedelta(seconds=self.stall_seconds)

    @property
    def grace(self) -> timedelta:
        """How long a published message may take before a sweep checks it."""
        return timedelta(seconds=self.grace_seconds)

    @property
    def max_sleep(self) -> timedelta:
        """The longest sleep and the longest wait."""
        return timedelta(seconds=self.max_sleep_seconds)

    def retention_of(self, own: timedelta | None) -> timedelta | None:
        """How long an ended instance is kept: ``own`` of its workflow, or the app's if that is UNSET; None: forever."""
        if own is not UNSET:
            return own
        return None if self.retention_seconds is None else timedelta(seconds=self.retention_seconds)

    @property
    def limits(self) -> PayloadLimits:
        """The limits of size and depth of a payload."""
        return PayloadLimits(self.max_payload_bytes, self.max_payload_depth)

    @property
    def step_policy(self) -> StepPolicy:
        """The policy of a step without a configuration of its own."""
        return StepPolicy().override_with(self.step_defaults)


def _is_on(name: str, switch: Switch) -> bool:
    """Whether a switch is on. It is if its function fails: an outage of feature flags must not stop workflows."""
    if isinstance(switch, bool):
        return switch
    try:
        return bool(switch())
    except Exception:
        logger.warning("The function %s failed, so the setting counts as on", name, exc_info=True)
        return True


_BOUNDS = {
    "max_workflow_name": (255, "the column holds 255 characters"),
    "max_instance_id": (255, "the column holds 255 characters"),
    "max_event_type": (255, "the column holds 255 characters"),
    "max_step_name": (256, "the column holds 256 characters"),
    "max_log_category": (255, "the column holds 255 characters"),
    "max_payload_depth": (200, "pydantic reads JSON of up to 200 levels"),
}

_MIN_WORKER_LOST_SECONDS = 5
MIN_KEY_LENGTH = 32
KEY_REMEDY = (
    f"set a secret of at least {MIN_KEY_LENGTH} characters, the same in all processes, for example from "
    "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
)
_TABLE_PREFIX = re.compile(r"[^%`\x00-\x1f\x7f]{0,33}")
"""With the longest name of an index, 33 characters are 63, the limit of PostgreSQL.

SQLAlchemy doubles ``%`` and backticks, but not in the options of a table and not in hints of an index.
"""

_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


_OF_DJANGO = frozenset({"CELERY_DURABLE_APP", "CELERY_DURABLE_DATABASE"})
"""Settings that the integration of Django reads from Django's own settings, in which Celery finds them too."""


def read_settings(conf: Mapping[str, Any], *, names: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """Read the settings from a Celery configuration; raises SettingUnknown and ConfigInvalid.

    ``names``: how the user wrote the keys that an integration copied to ``conf``, such as ``DURABLE_QUEUE``, for
    errors.
    """
    given: dict[str, Any] = {}
    for name, key in _find_keys(conf).items():
        field = name.removeprefix("durable_")
        if field not in _FIELDS:
            raise _make_unknown(names.get(key, key), field)
        given[field] = conf[key]
    try:
        return _make_settings(given)
    except ConfigInvalid as error:
        raise name_as_written(error, conf, names) from None


def _make_settings(given: dict[str, Any]) -> Settings:
    settings = Settings(**given)
    longest = settings.redispatch_max_seconds
    # The default may be more than the user's maximum, which then holds.
    if "redispatch_seconds" in given and settings.redispatch_seconds > longest:
        remedy = f"use at most durable_redispatch_max_seconds, which is {longest}"
        raise ConfigInvalid("durable_redispatch_seconds", settings.redispatch_seconds, remedy)
    return settings


def name_as_written(error: ConfigInvalid, conf: Mapping[str, Any], names: Mapping[str, str]) -> ConfigInvalid:
    """Return the error with its setting named as the user wrote it. ``names``: as for `read_settings`."""
    key = _find_keys(conf).get(error.setting, error.setting)
    return ConfigInvalid(names.get(key, key), error.value, error.remedy)


def _find_keys(conf: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of settings in ``conf``, by their names such as ``durable_queue``."""
    keys = [str(key) for key in conf]  # makes Celery load its configuration, after which it knows its prefix
    prefix = (getattr(conf, "prefix", None) or "celery_").lower()
    found = {key.lower().removeprefix(prefix): key for key in keys if key not in _OF_DJANGO}
    return {name: key for name, key in found.items() if name.startswith("durable_")}


def _make_unknown(key: str, field: str) -> SettingUnknown:
    """Return the error for a key, which names it and its like in the form in which the key is written."""
    near = difflib.get_close_matches(field, _FIELDS, n=1, cutoff=0.5)  # `lease` is near `lease_seconds`
    if not near:
        return SettingUnknown(key, None)
    return SettingUnknown(key, key[: -len(field)] + (near[0].upper() if key.isupper() else near[0]))


def _check(field: dataclasses.Field[Any], value: object) -> None:
    is_fit, remedy = _RULES[str(field.type)]
    if not is_fit(value):
        raise ConfigInvalid(f"durable_{field.name}", value, remedy)


_CENTURY_SECONDS = 100 * 365 * 86400
"""More overflows a timedelta, or a date of the database."""


def _is_length_of_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _CENTURY_SECONDS


_SECONDS = "use a number of seconds above 0, up to a hundred years"
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int and value > 0, "use a whole number above 0"),
    "float": (_is_length_of_time, _SECONDS),
    "float | None": (lambda value: value is None or _is_length_of_time(value), f"{_SECONDS}, or None"),
    "bool": (lambda value: isinstance(value, bool), "use True or False"),
    "Switch": (
        lambda value: isinstance(value, bool) or callable(value),
        "use True, False, or a function without arguments that returns one of them",
    ),
    "str": (lambda value: isinstance(value, str), "use text"),
    "str | None": (lambda value: value is None or isinstance(value, str), "use text, or None"),
    "Dispatcher": (lambda value: value in get_args(Dispatcher), "use one of beat, worker, both, none"),
    "Tracebacks": (lambda value: value in get_args(Tracebacks), "use one of full, author, none"),
    "OnLost": (lambda value: value in get_args(OnLost), "use one of resend, fail, wait"),
    "StepConfig | None": (lambda value: value is None or isinstance(value, StepConfig), "use a StepConfig, or None"),
}
