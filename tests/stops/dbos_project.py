"""DBOS Transact: ``worker``, ``enqueue IDS`` and ``states IDS``. Its environment has dbos, and no more."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from dbos import DBOS, DBOSClient

from tests.stops import witness

folder = Path(os.environ["STOPS_FOLDER"])
url, NAME, QUEUE, VERSION = os.environ["STOPS_DATABASE"], "stops", "payments", "1"


@DBOS.step()
def pay(job: str) -> None:
    witness.work(folder, job, 1, raises_first=False)


@DBOS.workflow()
def payment(job: str) -> None:
    pay(job)


def launch() -> None:
    config: Any = {
        "name": NAME,
        "system_database_url": url,
        "application_version": VERSION,
        "executor_id": "stops",
        "log_level": "WARNING",
    }
    DBOS(config=config)
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=0.1)


def main(command: str, *ids: str) -> None:
    if command == "worker":
        launch()
        print("ready.", flush=True)
        threading.Event().wait()
    client = DBOSClient(system_database_url=url, application_name=NAME)
    if command == "enqueue":
        for job in ids:
            options: Any = {"queue_name": QUEUE, "workflow_name": payment.__qualname__, "workflow_id": job}
            client.enqueue(options | {"app_version": VERSION}, job)
    else:
        found = client.list_workflows(workflow_ids=list(ids))
        print(json.dumps({each.workflow_id: each.status for each in found}))
    client.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
