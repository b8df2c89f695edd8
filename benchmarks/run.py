"""What durable steps cost beside what they run on and beside other systems: `make bench`.

Every round asks all questions, one after the other; `make bench ARGS="--rounds 3 limit2 steps10"` asks only these. A
round in which others used the machine is left out. Each answer is a JSON line; the table at the end has the medians of
the rounds, and of the ratios within each round. A contender that is not installed is named and left out. The extra
`bench` installs all of them, except the server of Restate: restate_peer.py says how to get it.

Needs PostgreSQL and Redis on 127.0.0.1; BENCH_POSTGRESQL_URL and BENCH_BROKER name others. MariaDB is measured if it
answers there, or at BENCH_MARIADB_URL. Makes and drops databases
of its own, and deletes what it has written to Redis.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator

import absurd_peer
import celery_peer
import databases
import dbos_peer
import latencies
import limits
import restate_peer
from engine import EngineQuestions
from machine import OTHERS_AT_MOST, OthersMeter, wait_until_quiet
from measuring import Answer, Question
from servers import drop_database, forget_keys, fresh_database


class Bench:
    """The questions, and the rounds in which they are asked."""

    def __init__(self, instances: int) -> None:
        fresh_database()
        self._engine = EngineQuestions()
        self.questions: dict[str, Question] = {
            **limits.questions(min(limits.SECONDS, instances / 100)),
            **celery_peer.questions(instances),
            **self._engine.questions(instances),
            **latencies.questions(instances),
            **databases.questions(instances),
            **dbos_peer.questions(instances),
            **absurd_peer.questions(instances),
            **restate_peer.questions(instances),
        }

    def choose(self, names: list[str]) -> list[str]:
        """These questions, or all, and the ones that they are compared with. Prints those that cannot be asked."""
        wanted = set(names or self.questions)
        wanted |= {reference for name in wanted if (reference := self.questions[name].reference)}
        chosen = []
        for name, question in self.questions.items():
            if name in wanted and (missing := question.missing()):
                print(json.dumps({"question": name, "left_out": f"not installed: {', '.join(missing)}"}), flush=True)
            elif name in wanted:
                chosen.append(name)
        return chosen

    def ask_round(self, names: list[str], number: int, *, is_last: bool) -> dict[str, Answer] | None:
        """The answers of a round. None if others used the machine: such a round ends at once, unless it is the last."""
        answers, was_quiet = {}, True
        if not is_last:
            wait_until_quiet(60)
        for name in names:
            answers[name], is_quiet = self.ask(name, number)
            was_quiet &= is_quiet
            if not (was_quiet or is_last):
                break
        return answers if was_quiet else None

    def ask(self, name: str, number: int) -> tuple[Answer, bool]:
        """The answer, and whether others left the machine alone meanwhile."""
        others = OthersMeter()
        answer = self.questions[name].ask()
        used = others.share()
        is_quiet = used <= OTHERS_AT_MOST
        line = {"round": number, "question": name, **answer, "others_cpu": round(used, 2), "is_quiet": is_quiet}
        print(json.dumps(line), flush=True)
        return answer, is_quiet

    def close(self) -> None:
        self._engine.durable.close()
        for name in (dbos_peer.DATABASE, absurd_peer.DATABASE):
            drop_database(name)
        drop_database()
        forget_keys()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help="all by default; what a ratio needs is asked as well")
    parser.add_argument("--rounds", type=int, default=5, help="how many quiet rounds")
    parser.add_argument("--tries", type=int, help="how many rounds at most, with those that are left out")
    parser.add_argument("--instances", type=int, default=1500, help="how many workflows of 10 steps")
    args = parser.parse_args()
    bench = Bench(args.instances)
    try:
        if unknown := set(args.questions) - set(bench.questions):
            parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(bench.questions)}")
        rounds: list[dict[str, Answer]] = []
        chosen, tried = bench.choose(args.questions), 0
        tries = args.tries or 2 * args.rounds
        while len(rounds) < args.rounds and tried < tries:
            tried += 1
            if round_ := bench.ask_round(chosen, tried, is_last=tried == tries):
                rounds.append(round_)
    finally:
        bench.close()
    print(f"\n{len(rounds)} rounds; {tried - len(rounds)} left out, in which others used the machine")
    for line in table(bench.questions, rounds):
        print(line)
    return 0 if rounds else 1


def table(questions: dict[str, Question], rounds: list[dict[str, Answer]]) -> Iterator[str]:
    """A line for each question: the medians of its numbers, and of its ratio to another one."""
    for name in rounds[0] if rounds else ():
        question = questions[name]
        numbers = {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        main_key = next(iter(numbers))
        cells = [f"{numbers.pop(main_key):8.1f}  {question.title}"]
        if (reference := question.reference) is not None:
            ratio = statistics.median(each[name][main_key] / next(iter(each[reference].values())) for each in rounds)
            cells.append(f"{ratio:.2f} of {reference}")
        yield "; ".join([*cells, *(f"{value:.2f} {key}" for key, value in numbers.items())])


if __name__ == "__main__":
    sys.exit(main())
