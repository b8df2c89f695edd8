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
    mutant(
        "the id of the database is kept although its transaction was rolled back",
        ("store.database_identity:ensure_database_id", "if found != store.inserted_database_id:", "if True:"),
        caught_by="tests/store/test_database_identity.py"
        "::test_an_id_whose_transaction_was_rolled_back_is_forgotten[postgresql]",
    ),
    # --- steps on MariaDB -----------------------------------------------------------------------
    mutant(
        "a step added in one statement on MariaDB passes over a pause",
        ("store.step_rows:_insert_if_unpaused", ".where(i.pause_requested == sa.false())", ""),
        caught_by="tests/store/test_guards.py::test_it_sees_the_pause_that_it_waited_for[mariadb]",
    ),
    mutant(
        "MariaDB reads the clock anew for each column of a step",
        ("store.step_rows:_insert_if_unpaused", ".limit(1)", ""),
        caught_by="tests/store/test_guards.py::test_all_times_of_its_step_are_the_same_moment[mariadb]",
    ),
    # --- connections ----------------------------------------------------------------------------
    mutant(
        "the kept connections take turns, so none of them becomes idle",
        ("store.connections:Connections._take_idle", "self._idle.pop()", "self._idle.pop(0)"),
        caught_by="tests/store/test_kept_connections.py"
        "::test_the_kept_connections_that_are_not_needed_become_idle[postgresql]",
    ),
    mutant(
        "a lost connection leaves the others of a restarted server",
        ("store.connections:Connections.return_to_pool", "if kept.conn.invalidated:", "if False:"),
        caught_by="tests/store/test_kept_connections.py::test_a_lost_connection_closes_the_other_kept_ones[postgresql]",
    ),
    mutant(
        "a process keeps a connection for each of its threads",
        ("store.connections:Connections.keep", "len(self._kept) < MAX_KEPT", "True"),
        caught_by="tests/store/test_kept_connections.py::test_a_process_keeps_some_connections[postgresql]",
    ),
    mutant(
        "a kept connection collects what SQLAlchemy would undo",
        (
            "store.connection_modes:_PostgresqlMode._switch_isolation_level",
            "dialect.set_isolation_level(conn.connection.dbapi_connection, isolation_level)",
            "conn.execution_options(isolation_level=isolation_level)",
        ),
        caught_by="tests/store/test_connections.py"
        "::test_a_kept_connection_does_not_grow_with_its_transactions[postgresql]",
    ),
    mutant(
        "a tracer that has wrapped PyMySQL sees nothing",
        ("store.drivers:_connect_watched", "if connect is connection_type:", "if True:"),
        caught_by="tests/store/test_drivers.py::test_a_wrapped_connect_of_pymysql_is_called[mariadb-pymysql]",
    ),
)
