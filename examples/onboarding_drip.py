"""A new user gets a mail now and then for three weeks, and a different one after the account is used.

Weeks of waiting, and nothing waits: between the steps there is a row in the database, no process and no message.
Deploys, crashes and reboots in the meantime do not matter.

From the folder above this one, once, and then in one terminal:

    celery -A examples.onboarding_drip durable migrate
    celery -A examples.onboarding_drip worker

In another, with days of two seconds for those who cannot wait:

    python -m examples.onboarding_drip start ada --day-seconds 2
    python -m examples.onboarding_drip activate ada
    python -m examples.onboarding_drip show ada
"""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta
from typing import Literal

from celery import Celery
from pydantic import BaseModel

from celery_durable import Durable, EventTimeout, Step, WorkflowEvent, durable_workflow
from examples import embedded

logger = logging.getLogger(__name__)

app = Celery("onboarding")
app.conf.update(embedded.settings())
app.conf.durable_dispatcher = "both"  # a worker alone is enough; with beat there are two, which does no harm
durable = Durable(app)


class User(BaseModel):
    name: str
    day: timedelta = timedelta(days=1)


def send_mail(to: str, subject: str) -> None:
    logger.info("Mail to %s: %s", to, subject)


Outcome = Literal["activated", "cold"]


@durable_workflow(name="onboarding")
def onboarding(event: WorkflowEvent[User], step: Step) -> Outcome:
    user = event.payload
    step.do("mail: welcome", send_mail, user.name, "welcome")
    step.sleep_until("day 1", event.timestamp + user.day)
    step.do("mail: first project", send_mail, user.name, "your first project")

    # An event that came early, on the first day, is kept for the first wait that asks for its type.
    for subject, days in [("invite your team", 2), ("what others built", 4), ("goodbye", 14)]:
        try:
            step.wait_for_event(f"activated before {subject!r}?", "activated", timeout=user.day * days)
        except EventTimeout:
            step.do(f"mail: {subject}", send_mail, user.name, subject)
        else:
            step.do("mail: well done", send_mail, user.name, "well done")
            step.sleep("a month of use", user.day * 30)
            step.do("mail: how is it going", send_mail, user.name, "how is it going?")
            return "activated"
    return "cold"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.onboarding_drip")
    parser.add_argument("command", choices=["start", "activate", "show"])
    parser.add_argument("user")
    parser.add_argument("--day-seconds", type=float, default=86400.0, help="how long a day is, from 0.5")
    args = parser.parse_args()
    match args.command:
        case "start":
            onboarding.create(User(name=args.user, day=timedelta(seconds=args.day_seconds)), id=args.user)
        case "activate":
            onboarding.get(args.user).send_event("activated")
    history = onboarding.get(args.user).history()
    print(f"{args.user}: {history.status.status} {history.status.output or ''}")
    for record in history.steps:
        until = f"until {record.wake_at:%a %H:%M:%S} UTC" if record.wake_at and record.status == "waiting" else ""
        print(f"  {record.name:<40} {record.status:<10} {until}")


if __name__ == "__main__":
    main()
