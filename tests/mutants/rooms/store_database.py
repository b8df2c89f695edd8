"""Bugs in the store: connections, statements and migrations."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "the watchdog cuts what has ended",
        ("store.watchdog:WatchedSocket.disarm", "self._deadlines.pop()", "self._deadlines[0]"),
        caught_by="tests/store/test_watchdog.py::test_a_statement_that_has_ended_is_never_cut[postgresql]",
    ),
    mutant(
        "prepared statements run between the statements of an author",
        ("store.engine:Store._run_transaction", " and not has_user_statements", ""),
        caught_by="tests/store/test_libpq.py::test_a_transaction_with_statements_of_others_uses_a_cursor[postgresql]",
    ),
    mutant(
        "a migration in a caller's transaction takes its strongest lock last",
        ("store.online_changes:replace_index", "(drop, create)", "(create, drop)"),
        caught_by="tests/migration/test_online.py::"
        "test_an_applications_migration_and_a_writer_do_not_lock_each_other_out[postgresql]",
    ),
)
