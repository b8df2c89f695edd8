"""The debugger of recorded runs: pdb at each step, forward and back. It runs no step and writes nothing.

To go back, it leaves the replay and begins another one, which stops earlier.
"""

from __future__ import annotations

import pdb  # noqa: T100  # it is what this module is about
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO

from celery_durable.errors.base import name_error
from celery_durable.insight.replay_check import OnStep, ReplayResult
from celery_durable.model import StepRow, StepStatus
from celery_durable.runner.step_execution import StepExecution

_ENGINE = __name__.partition(".")[0] + "."


class StepDebugger(pdb.Pdb):
    """Stops at each step call of a replay, in the frame of the code that makes it. Reads commands from ``input_``."""

    def __init__(self, steps: Sequence[StepRow], *, input_: TextIO | None, output: TextIO) -> None:
        super().__init__(stdin=input_, stdout=None if input_ is None else output, nosigint=True)
        self.prompt = "(durable) "
        self._steps = steps
        self._target: int | str | None = 1
        """The number or the name of the step to stop at; None: run to the end."""
        self._position, self._is_leaving, self._is_tracing, self._has_moved = 0, False, False, False
        self._current: StepExecution | None = None
        """The step at whose call the code stands; None after it has returned."""
        self._leave: Callable[[], NoReturn] | None = None

    def run_replays(self, replay: Callable[[OnStep], ReplayResult]) -> ReplayResult | None:
        """Replay until the user quits, and then return None, or until a replay reaches its end: return its result."""
        while True:
            self._position, self._is_leaving, self._is_tracing = 0, False, False
            result = replay(self._stop_at_step)
            sys.settrace(None)
            if not self._is_leaving:
                return result
            if self._target is None:
                return None

    # --- where it stops ---------------------------------------------------------------------------

    def _stop_at_step(self, execution: StepExecution, leave: Callable[[], NoReturn]) -> None:
        self._position += 1
        self._current, self._leave = execution, leave
        if not self._is_tracing and self._target not in (self._position, execution.key):
            return
        self.message(self._describe(execution))
        if self._is_tracing:  # the user is stepping over this call line by line
            self._current = None
            return
        frame = _find_code_frame()
        self.reset()
        self.botframe = _find_outermost(frame)
        self._has_moved = False
        self.interaction(frame, None)
        self._current = None
        if self._is_leaving:
            leave()
        if not self._has_moved:  # step, next and the like of pdb: trace the code, until the next own command
            self._trace(frame)

    def _trace(self, frame: FrameType) -> None:
        chosen: Any = self.stopframe, self.returnframe, self.stoplineno
        self._is_tracing = True
        self.set_trace(frame)
        self._set_stopinfo(*chosen)  # type: ignore[attr-defined]  # set_trace would stop at the next line

    def stop_here(self, frame: FrameType) -> bool:
        """Stop in the code of the workflow only, not in the engine and not in what the engine calls."""
        return bool(super().stop_here(frame)) and _is_code_of_workflow(frame)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        """Ask for commands. While the code is traced, this may end with leaving the replay."""
        super().interaction(frame, *args)
        if self._is_leaving and self._is_tracing and self._leave is not None:
            sys.settrace(None)
            self._leave()

    # --- commands ---------------------------------------------------------------------------------

    def do_forward(self, arg: str) -> bool:
        """forward [number]

        Go on to the next step call, or by so many.
        """
        number = self._read_number(arg)
        return number is not None and self._go_on(self._position + number)

    def do_back(self, arg: str) -> bool:
        """back [number]

        Go back to the step call before, or by so many.
        """
        number = self._read_number(arg)
        if number is None:
            return False
        here = self._position if self._current is not None else self._position + 1
        return self._start_again(max(here - number, 1))

    def do_goto(self, arg: str) -> bool:
        """goto number|name

        Go to a step call by its number in the list of `steps`, or by its name.
        """
        name = arg.strip()
        if name.isdecimal():
            return self._start_again(max(int(name), 1))
        if name not in {row.step_key for row in self._steps}:
            self.error(f"No step {name!r} is recorded. Type steps.")
            return False
        return self._start_again(name)

    def do_steps(self, arg: str) -> None:  # noqa: ARG002  # pdb's signature
        """steps

        List the recorded steps. The arrow is where the code stands.
        """
        key = None if self._current is None else self._current.key
        for number, row in enumerate(self._steps, start=1):
            self.message(f"{'->' if row.step_key == key else '  '} {number:3} {row.name} ({row.type}), {row.status}")

    def do_result(self, arg: str) -> None:  # noqa: ARG002  # pdb's signature
        """result

        Print the recorded result of the step at whose call the code stands, as JSON.
        """
        row = None if self._current is None else self._current.entry.row
        if row is None or row.status is not StepStatus.COMPLETED:
            self.error("The code stands at no completed step.")
        else:
            self.message(row.result or "null")

    def do_continue(self, arg: str) -> bool:  # noqa: ARG002  # pdb's signature
        """continue

        Go on to the next breakpoint, or to the end of the record.
        """
        self._target = None
        if self.breaks:
            self.set_continue()
            return True
        return self._go_on(None)

    def do_quit(self, arg: str) -> bool:  # noqa: ARG002  # pdb's signature
        """quit

        Leave the debugger.
        """
        return self._start_again(None)

    do_c = do_cont = do_continue
    do_q = do_exit = do_EOF = do_quit
    do_fw, do_bk = do_forward, do_back

    def do_run(self, arg: str) -> bool:  # noqa: ARG002  # pdb's signature
        """run

        Begin again at the first step call.
        """
        return self._start_again(1)

    do_restart = do_run

    def _read_number(self, arg: str) -> int | None:
        text = arg.strip() or "1"
        if text.isdecimal() and int(text) > 0:
            return int(text)
        self.error(f"{text!r} is no number of steps.")
        return None

    def _go_on(self, target: int | None) -> bool:
        self._target, self._has_moved, self._is_tracing = target, True, False
        self.set_continue()
        sys.settrace(None)
        return True

    def _start_again(self, target: int | str | None) -> bool:
        self._target, self._has_moved, self._is_leaving = target, True, True
        return True

    def _describe(self, execution: StepExecution) -> str:
        row, name = execution.entry.row, execution.name
        if row is None:
            return f"Call {self._position}: step {name!r} is not recorded. A worker would run it now."
        what = f"Call {self._position}: step {name!r} ({row.type})"
        match row.status:
            case StepStatus.COMPLETED:
                return f"{what} returns what was recorded at {row.finished_at:%Y-%m-%d %H:%M:%S} UTC."
            case StepStatus.ERRORED:
                return f"{what} raises the recorded {name_error(str(row.error_name), row.error_message)}"
            case status:
                return f"{what} is {status}."


def _find_code_frame() -> FrameType:
    """Return the innermost frame that is not the engine's: the code that calls the step."""
    frame = sys._getframe(1)  # noqa: SLF001  # as pdb does
    while _is_engine(frame):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def _find_outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None and not _is_engine(frame.f_back):
        frame = frame.f_back
    return frame


def _is_code_of_workflow(frame: FrameType) -> bool:
    """Whether a frame is the workflow's function, or was called by it without the engine in between."""
    return not _is_engine(frame) and _is_pass(_find_outermost(frame).f_back)


def _is_pass(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__") == "celery_durable.runner.function_pass"


def _is_engine(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_ENGINE)
