"""Chance: random numbers, UUIDs, and values that differ between processes."""

from __future__ import annotations

from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules.calls import CallTable
from celery_durable.lint.workflow_code import WorkflowCode

RANDOM = Rule("CD201", "Use step.random(), or draw in a step.")
UUID = Rule("CD202", "Use step.uuid(), or make the id in a step.")
PROCESS_VALUE = Rule("CD203", "Use a value that is the same in each process, such as a field or hashlib.sha256().")

RULES = (RANDOM, UUID, PROCESS_VALUE)

RANDOM_CALLS = CallTable(
    RANDOM,
    "returns something else on each pass",
    frozenset({"os.urandom", "os.getrandom"}),
    prefixes=("random.", "secrets.", "numpy.random."),
    without_arguments={"random.Random": 1, "numpy.random.default_rng": 1, "numpy.random.RandomState": 1},
    allowed=frozenset({"secrets.compare_digest", "numpy.random.SeedSequence"}),
)
UUID_CALLS = CallTable(
    UUID,
    "returns another id on each pass",
    frozenset({
        "uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "shortuuid.uuid", "ulid.new",
        "uuid_utils.uuid1", "uuid_utils.uuid4", "uuid_utils.uuid6", "uuid_utils.uuid7", "uuid_utils.compat.uuid1",
        "uuid_utils.compat.uuid4", "uuid_utils.compat.uuid6", "uuid_utils.compat.uuid7", "celery.utils.uuid",
        "ulid.ULID", "nanoid.generate",
    }),
)  # fmt: skip
PROCESS_CALLS = CallTable(
    PROCESS_VALUE, "differs between processes", frozenset({"builtins.hash", "builtins.id", "os.getpid"})
)


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield calls whose result is random or belongs to the process."""
    for table in (RANDOM_CALLS, UUID_CALLS, PROCESS_CALLS):
        yield from table.find(code)
