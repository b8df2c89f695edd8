"""Bugs in the dispatcher, in publishing and in what watches the tasks of others."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_POST = "tasks.outbox:Outbox._send_part"
_ATTACHING = "tests/celery/test_attaching.py::"
_WORKERS = "tests/celery/test_workers.py::"
_BOUNDS = "tests/publishing/test_bounds.py::"
_CALLERS = "tests/publishing/test_callers.py::"
_REFUSALS = "tests/publishing/test_refusals.py::"
_ANSWERS = "tests/celery/test_answers.py::"

MUTANTS = (
    # --- since when, and for how long ---------------------------------------------------------------
    mutant(
        "an eager run must end in the time of the request that started it",
        ("tasks.publishing.eager:EagerTasks._run_in_order", "with restore_own_timeouts():", "if True:"),
        caught_by="tests/celery/test_eager.py::"
        "test_a_run_has_its_own_time_if_the_request_that_creates_it_has_used_up_its_time[sqlite]",
    ),
    # --- the sweep ------------------------------------------------------------------------------
    mutant(
        "only one sight of an empty queue is remembered until it counts",
        ("tasks.flow_control:_QueueState._drop_old_times", "at + slack > now]", "at + slack > now][:1]"),
        caught_by="tests/engine/test_workers.py::"
        "test_a_sweep_does_not_repeat_itself_before_a_worker_had_its_chance[sqlite]",
    ),
    mutant(
        "a sweep that looks only once believes no empty queue",
        ("tasks.dispatcher:Sweeper.sweep_as_only_sweeper", "self._flow.slack = timedelta(0)", "pass"),
        caught_by="tests/cli/test_overview.py::"
        "test_a_sweep_that_comes_once_sends_again_what_was_lost_and_nothing_that_waits[sqlite]",
    ),
    mutant(
        "an empty queue says nothing of the hints that it had",
        ("tasks.flow_control:FlowControl.read_capacity", "if length == 0:", "if False:"),
        caught_by="tests/engine/test_create.py::test_an_instance_whose_message_was_lost_is_found_by_the_sweep[sqlite]",
    ),
    mutant(
        "a queue that refuses is offered everything each time",
        ("tasks.flow_control:FlowControl.read_capacity", "if monotonic_now < queue.backoff_until:", "if False:"),
        caught_by="tests/celery/test_publishing.py::"
        "test_a_queue_that_refuses_is_tried_ever_more_rarely_and_holds_up_no_other[sqlite]",
    ),
    mutant(
        "the outbox is emptied before a dispatcher looks at instances",
        (
            "tasks.dispatcher:Sweeper._run_round",
            "for kind in (self._publish_due_runs, self._republish_lost, self._send_outbox):",
            "while True:\n"
            "            count, has_more = self._send_outbox(self._agenda.read())\n"
            "            published += count\n"
            "            if not has_more:\n"
            "                break\n"
            "        for kind in (self._publish_due_runs, self._republish_lost):",
        ),
        caught_by="tests/celery/test_turns.py::test_a_full_outbox_delays_an_instance_by_one_batch[sqlite]",
    ),
    # --- lost tasks -----------------------------------------------------------------------------
    mutant(
        "what is in no list at the first inventory is lost",
        ("tasks.lost.detection:_evaluate_inventory", "search.round == ROUNDS", "search.round >= 1"),
        caught_by="tests/lost/test_elimination.py::test_what_is_concluded_is_lost_and_what_was_lost_is_concluded",
    ),
    mutant(
        "the roll is called before the marker has passed",
        ("tasks.lost.detection:decide", "if search.marker in observations.received_markers:", "if search.marker:"),
        caught_by="tests/lost/test_elimination.py::test_nobody_is_asked_before_the_marker_has_come_back",
    ),
    mutant(
        "a worker whose loop is stuck is waited for without end",
        ("tasks.lost.detection:_max_wait_seconds", "return STUCK_LOOP_SECONDS", "return math.inf"),
        caught_by="tests/engine/test_search.py::"
        "test_what_a_worker_holds_whose_loop_is_stuck_is_lost[sqlite-prefork-True]",
    ),
    mutant(
        "workers that an outage has silenced are dead",
        ("tasks.lost.detection:_evaluate_inventory", "observations.reachable_seconds < MIN_REACHABLE_SECONDS", "False"),
        caught_by="tests/engine/test_search.py::"
        "test_nothing_is_lost_before_the_database_was_seen_for_long_enough[sqlite]",
    ),
    mutant(
        "a message that is still in the outbox is lost",
        (
            "tasks.lost.search:LostTaskSearch._start_searches",
            "self._store.read(lambda tx: lost_tasks.exclude_unsent(tx, page.tasks)) if page.tasks else []",
            "list(page.tasks)",
        ),
        caught_by="tests/engine/test_search.py::test_what_has_not_left_the_outbox_is_not_searched_for[sqlite]",
    ),
    mutant(
        "a worker forgets what waits for its ETA",
        ("tasks.lost.held_tasks:HeldTasks.list_ids", "not request.acknowledged", "False"),
        caught_by="tests/celery/test_lost.py::"
        "test_a_worker_holds_what_it_has_received_until_it_has_ended[sqlite-threads]",
    ),
    mutant(
        "a worker holds what a lost connection has returned",
        (
            "tasks.lost.held_tasks:HeldTasks.list_ids",
            "connection() is consumer.connection",
            "True",
        ),
        caught_by="tests/celery/test_lost.py::"
        "test_a_worker_holds_what_came_over_a_lost_connection_only_if_its_pool_has_it[sqlite-waits for its ETA]",
    ),
    mutant(
        "a copy of what was answered runs",
        ("tasks.lost.duplicates:DuplicateFilter._revoke_if_answered", "state.revoked.add(task_id)", "pass"),
        caught_by="tests/celery/test_lost.py::test_a_copy_that_nobody_waits_for_does_not_run[sqlite-1-True-False]",
    ),
    # --- how tasks end --------------------------------------------------------------------------
    mutant(
        "an answer is neither taken nor sent anew but acknowledged",
        ("tasks:_commit_or_resend", "_send_answer(task, answers, message)", "pass"),
        caught_by=_ANSWERS + "test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it[sqlite]",
    ),
    mutant(
        "an answer is neither committed where its task ran nor sent",
        (
            "tasks.task_ends:TaskEndHandler._make_commit",
            "reference.ref, exc)\n            return False",
            "reference.ref, exc)",
        ),
        caught_by=_ANSWERS + "test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it[sqlite]",
    ),
    mutant(
        "an answer for another database is committed to this one",
        (
            "tasks.answers:AnswerCommitter.is_awaited_here",
            "self._operations().answers.find_database_id() == reference.database_id",
            "True",
        ),
        caught_by=_ANSWERS + "test_a_task_of_another_database_answers_by_message[sqlite]",
    ),
    mutant(
        "every answer is a message",
        (
            "tasks.answers:AnswerCommitter.is_awaited_here",
            "self._operations().answers.find_database_id() == reference.database_id",
            "False",
        ),
        caught_by=_ANSWERS + "test_results_and_errors_come_back_from_a_worker[sqlite]",
    ),
    mutant(
        "a task that ends without a callback answers nobody",
        (
            "tasks.task_ends:TaskEndHandler._handle_postrun",
            "self.commit_or_send_error(encode_exception(retval), raw_reference)",
            "pass",
        ),
        caught_by=_ANSWERS + "test_ends_that_call_nothing_are_answered_too[sqlite]",
    ),
    mutant(
        "a failure that the result backend does not take answers nobody",
        (
            "tasks.task_ends:TaskEndHandler._handle_internal_error",
            "self.commit_or_send_error(encode_exception(error), raw_reference, request=request, raised=error)",
            "pass",
        ),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing[sqlite]",
    ),
    mutant(
        "a local queue is taken for one that other processes fill",
        ("tasks.flow_control:FlowControl.assume_local_queues", "self._has_local_queues = True", "pass"),
        caught_by="tests/celery/test_local_queues.py::test_a_message_that_went_elsewhere_is_sent_here[True-1-sqlite]",
    ),
    # --- the outbox -----------------------------------------------------------------------------
    mutant(
        "an outbox message is removed before it is sent",
        (
            _POST,
            "report = self._send(messages)",
            "tasks = [each.id for each in messages if each.kind is OutboxKind.TASK]\n"
            "    self._store.transact(lambda tx: outbox.delete(tx, tasks))\n"
            "    report = self._send(messages)",
        ),
    ),
    mutant(
        "an outbox message that the broker refused is removed",
        (_POST, "report.with_state(messages, SendState.SENT)", "messages"),
    ),
    mutant(
        "an outbound event is forgotten when it is sent",
        (_POST, " if each.kind is OutboxKind.TASK", ""),
    ),
    # --- outbound events ------------------------------------------------------------------------
    mutant(
        "what full queues leave due keeps a dispatcher busy",
        (
            "tasks.dispatcher:Dispatcher._check",
            "return left if left > 0 or published else self._settings.poll_seconds",
            "return left",
        ),
        (
            "tasks.flow_control:FlowControl.queue_backoff",
            "return max(full, queue.backoff_until - now, 0.0)",
            "return 0.0",
        ),
        caught_by="tests/celery/test_dispatcher_pace.py::"
        "test_a_dispatcher_rests_while_full_queues_leave_work_due[sqlite]",
    ),
    # --- somebody else's worker -----------------------------------------------------------------
    mutant(
        "our messages follow the application's routes",
        ("tasks.options:send_past_routes", "if not app.conf.task_always_eager:", "if False:"),
        caught_by=_ATTACHING + "test_a_catch_all_route_does_not_catch_beats_sweeps[sqlite-exchange]",
    ),
    mutant(
        "only a declared queue is known to who publishes",
        ("tasks.queues:_add_queue", "queues.select_add(_make_queue(app, name))", "pass"),
        caught_by=_ATTACHING + "test_a_client_publishes_where_queues_were_assigned_late_and_missing_ones_are_not_made",
    ),
    mutant(
        "any pool runs workflows",
        ("tasks.pools:runs_workflows", "return pool in SUPPORTED_POOLS", "return True"),
        caught_by=_WORKERS + "test_a_workflow_on_the_own_queue_of_a_worker_on_another_pool_is_left_for_others[sqlite]",
    ),
    mutant(
        "a worker on another pool consumes the queue of workflows",
        ("tasks.pools:stop_consuming", "queues.deselect([queue])", "pass"),
        caught_by=_WORKERS + "test_a_worker_on_another_pool_does_its_own_tasks_and_leaves_workflows_alone[sqlite]",
    ),
    mutant(
        "a failed acknowledgement is not repeated",
        ("tasks.redis_watchdog:RedisWatchdog.check", "not self._failed or", "True or"),
        caught_by="tests/celery/test_redis_watchdog.py::test_what_redis_did_not_take_is_repeated_when_it_is_back[ack]",
    ),
    # --- publishing -----------------------------------------------------------------------------
    mutant(
        "a process forks while a connection is made",
        ("tasks.publishing.sender:Sender._open_transport", "with self.fork_lock:", "with contextlib.nullcontext():"),
        caught_by="tests/publishing/test_forks.py::test_no_child_is_forked_while_a_connection_is_made[redis]",
    ),
    mutant(
        "a publisher waits for the sending thread without a limit",
        ("tasks.publishing.sender:Sender.run", "job.done.wait(seconds)", "job.done.wait()"),
        caught_by=_BOUNDS + "test_a_resolver_that_hangs_costs_one_caller_3_s_and_the_next_nothing[redis]",
    ),
    mutant(
        "the sender uses a connection that a caller has borrowed",
        ("tasks.publishing.sender:Sender._take_jobs", "self._borrowed is not None or not self._jobs", "not self._jobs"),
        caught_by=_CALLERS + "test_others_wait_until_a_caller_has_sent_its_message[redis]",
    ),
    mutant(
        "the connection of an interrupted caller is used again, with an old answer in it",
        ("tasks.publishing.sender:Sender._return", "if not is_usable:", "if False:"),
        ("tasks.publishing.sender:Sender._return", "if is_usable:", "if True:"),
        caught_by=_CALLERS + "test_what_a_signal_handler_raises_is_the_callers_and_costs_only_the_connection[rabbitmq]",
    ),
    mutant(
        "a caller opens a connection that the broker has closed",
        (
            "tasks.publishing.sender:Sender._run_on_caller",
            "transport is None or _have_input(transport.sockets())",
            "transport is None",
        ),
        caught_by=_CALLERS + "test_the_sender_opens_another_connection_where_the_broker_has_closed_it[redis]",
    ),
    mutant(
        "callers wait for a broker that is known to be away",
        (
            "tasks.publishing.circuit_breakers:CircuitBreakers.is_open",
            "record is not None and not record.has_answered_probe",
            "False",
        ),
        caught_by=_BOUNDS + "test_an_outage_of_the_outbox_is_bounded_too[redis]",
    ),
    mutant(
        "what was written to Redis counts as sent before it answers",
        ("tasks.publishing.transports.redis:RedisTransport.send", "SendState.UNKNOWN", "SendState.SENT"),
        caught_by=_BOUNDS + "test_an_outage_of_the_outbox_is_bounded_too[redis]",
    ),
    mutant(
        "what one queue of Redis refuses is the broker's failure",
        (
            "tasks.publishing.transports.redis:RedisTransport._refuse_or_raise",
            'if "WRONGTYPE" not in text and',
            "if True or",
        ),
        caught_by=_REFUSALS + "test_on_redis_each_refusal_stays_with_its_queue",
    ),
    mutant(
        "RabbitMQ confirms what no queue takes",
        (
            "tasks.publishing.transports.amqp:AmqpTransport._write",
            "any(isinstance(entity, Queue) for entity in batch.declare)",
            "False",
        ),
        caught_by=_REFUSALS + "test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost[queue]",
    ),
    mutant(
        "a message over the generic transport counts as sent before RabbitMQ confirms it",
        ("tasks.publishing.transports.generic:Transport._options", "if self._is_py_amqp else", "if False else"),
        caught_by=_REFUSALS + "test_the_generic_transport_reports_what_rabbitmq_has_not_taken_as_refused",
    ),
    mutant(
        "an error of one channel ends the confirms of all",
        ("tasks.publishing.transports.amqp:AmqpTransport._read_confirms", " if each.channel.connection is None", ""),
        caught_by=_REFUSALS + "test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost[exchange]",
    ),
    mutant(
        "a child of a fork sends what its parent was about to send",
        ("tasks.publishing.sender:Sender.reset_in_child", "self._reset()", "pass"),
        caught_by="tests/publishing/test_forks.py::"
        "test_a_child_publishes_whose_parent_was_handing_over_a_message[redis]",
    ),
    mutant(
        "a child of a fork keeps its parent's templates",
        ("tasks.publishing.templates:Templates.clear", "self._templates = {}", "pass"),
        caught_by="tests/publishing/test_forks.py::test_a_childs_messages_name_the_child[redis]",
    ),
    mutant(
        "an interrupted answer is not tried again",
        (
            "tasks.task_ends:_call_despite_soft_limit",
            "reference.ref)\n        return commit()",
            "reference.ref)\n        raise",
        ),
        caught_by="tests/celery/test_interrupted_answers.py",
    ),
    mutant(
        "an acknowledged task that puts itself back is awaited",
        ("tasks.lost.held_tasks:is_requeued", " and task.acks_late", ""),
        caught_by=_ANSWERS + "test_ends_that_call_nothing_are_answered_too",
    ),
    mutant(
        "a step's task subscribes to its result when it is sent",
        (
            "tasks.publishing.message_builder:MessageBuilder.build_outbox_messages",
            "prevent_result_subscription(self._app)",
            "pass",
        ),
        caught_by="tests/publishing/test_result_backends.py::"
        "test_a_redis_result_backend_that_refuses_does_not_keep_a_message_back",
    ),
    mutant(
        "a step gets the error of the result backend",
        (
            "tasks.task_ends:TaskEndHandler._handle_internal_error",
            "_find_task_exception(exception)",
            "(exception.__context__ or exception)",
        ),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    mutant(
        "a step gets the error that its task caught",
        ("tasks.task_ends:_find_task_exception", ".f_code.co_filename == trace.__file__", ""),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    mutant(
        "a retry that is not stored fails its step",
        ("tasks.task_ends:TaskEndHandler._handle_internal_error", "not isinstance(error, Retry)", "True"),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    mutant(
        "a result committed raw",
        ("tasks.task_ends:TaskEndHandler.commit_result", "commit_result(plain, ", "commit_result(result, "),
        caught_by=_ANSWERS + "test_a_result_is_the_same_committed_where_its_task_ran_or_sent",
    ),
    mutant(
        "a worker keeps the cancelled timers of a day",
        ("tasks.cancelled_timers:CancelledTimers.remove_if_many", " if not each.entry.canceled", ""),
        caught_by="tests/celery/test_cancelled_timers.py"
        "::test_the_timer_stays_small_although_each_message_leaves_a_cancelled_entry",
    ),
)
