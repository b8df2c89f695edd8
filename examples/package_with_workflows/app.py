"""The application: it makes the engine, registers what its packages bring, and hands them the service.

celery -A examples.package_with_workflows.app durable migrate
celery -A examples.package_with_workflows.app worker

python -m examples.package_with_workflows.app open s-1 ada
python -m examples.package_with_workflows.app say s-1 "my parcel is lost"
python -m examples.package_with_workflows.app show s-1
"""

from __future__ import annotations

import argparse

from celery import Celery
from sqlalchemy.orm import Session

from celery_durable import Durable
from examples import embedded
from examples.package_with_workflows.sessions import Sessions, metadata, required_workflows

app = Celery("support")
app.conf.update(embedded.settings())
app.conf.durable_dispatcher = "worker"

durable = Durable(app)
durable.register(required_workflows)  # or, for packages named in one place: durable.autodiscover(["...sessions"])
sessions = Sessions(durable.service)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="command", required=True)
    for command, *words in (("open", "session", "agent"), ("say", "session", "text"), ("show", "session")):
        parsed = actions.add_parser(command)
        for word in words:
            parsed.add_argument(word)
    given = parser.parse_args()
    match given.command:
        case "open":
            metadata.create_all(durable.engine)
            with Session(durable.engine) as db:
                sessions.open(db, given.session, agent=given.agent)
                db.commit()
        case "say":
            sessions.say(given.session, given.text)
        case "show":
            print("open" if sessions.is_open(given.session) else "closed", *sessions.steps(given.session), sep="\n")


if __name__ == "__main__":
    main()
