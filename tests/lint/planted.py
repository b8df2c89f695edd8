"""Mistakes that people make in workflows, each with the code of the rule that finds it.

Each text is the body of a workflow, indented as it stands there; ``PLANTED`` marks the line of the finding.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """``module``: lines above the workflow."""

    code: str
    body: str
    module: str = ""


MISTAKES = [
    Mistake("CD701", "step.do('ask', lambda: ask(1))  # PLANTED", "async def ask(number):\n    pass"),
    Mistake(
        "CD701",
        "step.gather(step.submit(asked))  # PLANTED",
        "async def ask():\n    pass\ndef asked():\n    return ask()",
    ),
    Mistake("CD702", "step.do('charge', charge, retries=0)  # PLANTED"),
    Mistake("CD702", "step.do('charge', lambda: 1, timeout=5)  # PLANTED"),
    Mistake("CD101", "deadline = time.time() + 60  # PLANTED", "import time"),
    Mistake("CD101", "at = datetime.now(UTC)  # PLANTED", "from datetime import UTC, datetime"),
    Mistake("CD101", "today = dt.date.today()  # PLANTED", "import datetime as dt"),
    Mistake("CD101", "year = strftime('%Y')  # PLANTED", "from time import strftime"),
    Mistake("CD101", "due = timezone.now()  # PLANTED", "from django.utils import timezone"),
    Mistake("CD102", "time.sleep(60)  # PLANTED", "import time"),
    Mistake("CD201", "if random.random() < 0.5:  # PLANTED\n    step.do('half', charge)", "import random"),
    Mistake("CD201", "token = secrets.token_hex()  # PLANTED", "import secrets"),
    Mistake("CD201", "dice = random.Random()  # PLANTED", "import random"),
    Mistake("CD202", "key = str(uuid4())  # PLANTED", "from uuid import uuid4"),
    Mistake("CD202", "key = uuid.uuid7()  # PLANTED", "import uuid_utils.compat as uuid"),
    Mistake("CD203", "shard = hash(event.instance_id) % 8  # PLANTED"),
    Mistake("CD301", "with open('prices.json') as file:  # PLANTED\n    prices = file.read()"),
    Mistake("CD301", "path = Path('in') / 'a'\nnames = list(path.iterdir())  # PLANTED", "from pathlib import Path"),
    Mistake("CD301", "shutil.rmtree('in')  # PLANTED", "import shutil"),
    Mistake("CD302", "rate = requests.get('https://bank.example/rate').json()  # PLANTED", "import requests"),
    Mistake("CD302", "with httpx.Client() as client:  # PLANTED\n    client.get('/')", "import httpx"),
    Mistake("CD303", "row = Order.objects.get(pk=event.payload)  # PLANTED", "from shop.models import Order"),
    Mistake("CD303", "with Session(engine) as session:  # PLANTED\n    pass", "from sqlalchemy.orm import Session"),
    Mistake("CD304", "subprocess.run(['convert', 'a.png'])  # PLANTED", "import subprocess"),
    Mistake("CD304", "Thread(target=charge).start()  # PLANTED", "from threading import Thread"),
    Mistake("CD305", "send_mail.delay(event.payload)  # PLANTED", "from shop.tasks import send_mail"),
    Mistake("CD305", "child.create('o-1')  # PLANTED", "@durable_workflow\ndef child(event, step):\n    pass"),
    Mistake("CD306", "if os.environ['REGION'] == 'eu':  # PLANTED\n    step.do('vat', charge)", "import os"),
    Mistake("CD306", "debug = getenv('DEBUG')  # PLANTED", "from os import getenv"),
    Mistake("CD401", "SEEN.append(event.payload)  # PLANTED", "SEEN = []"),
    Mistake("CD401", "global COUNT\nCOUNT += 1  # PLANTED", "COUNT = 0"),
    Mistake("CD401", "CACHE[event.payload] = 1  # PLANTED", "CACHE = dict()"),
    Mistake(
        "CD402", "if RATE > 1:  # PLANTED\n    step.do('vat', charge)",
        "RATE = 1\n\ndef reload_rate():\n    global RATE\n    RATE = 2",
    ),
    Mistake("CD403", "paid = []\ndef pay():\n    paid.append(1)  # PLANTED\nstep.do('pay', pay)\nif paid:\n    pass"),
    Mistake("CD403", "sum_ = 0\ndef pay():\n    nonlocal sum_\n    sum_ += 5  # PLANTED\nstep.do('pay', pay)"),
    Mistake("CD501", "step.do(f'charge {time.time_ns()}', charge)  # PLANTED", "import time"),
    Mistake("CD501", "step.sleep('nap ' + uuid.uuid4().hex, 5)  # PLANTED", "import uuid"),
    Mistake("CD501", "step.do(f'charge {id(event)}', charge)  # PLANTED"),
    Mistake("CD502", "for name in {'ada', 'bob'}:  # PLANTED\n    step.do(f'charge {name}', charge)"),
    Mistake("CD502", "names = set(event.payload)\nstep.gather(*[step.submit(n, charge) for n in names])  # PLANTED"),
    Mistake("CD502", "first = list(set(event.payload))[0]  # PLANTED"),
    Mistake("CD503", "for name in event.payload:\n    step.do('charge', charge, name)  # PLANTED"),
    Mistake("CD601", "step.submit('charge', charge)  # PLANTED"),
    Mistake("CD601", "branch = step.submit_sleep('nap', 5)  # PLANTED"),
    Mistake("CD602", "notify()  # PLANTED", "async def notify():\n    pass"),
    Mistake("CD603", "try:\n    step.sleep('nap', 5)\nexcept:  # PLANTED\n    pass"),
    Mistake(
        "CD603", "try:\n    step.do(charge)\nexcept Cancelled:  # PLANTED\n    step.do(refund)",
        "from celery_durable import Cancelled",
    ),
    Mistake("CD603", "try:\n    step.do(charge)\nexcept (KeyError, BaseException) as exc:  # PLANTED\n    print(exc)"),
    Mistake("CD603", "try:\n    step.do(charge)\nexcept* BaseException:  # PLANTED\n    pass"),
    Mistake(
        "CD603", "with suppress(BaseException):  # PLANTED\n    step.do(charge)", "from contextlib import suppress"
    ),
    Mistake("CD604", "try:\n    step.do(charge)\nfinally:\n    return 'ended'  # PLANTED"),
    Mistake("CD604", "while True:\n    try:\n        step.do(charge)\n    finally:\n        continue  # PLANTED"),
    Mistake("CD605", "step.do('all', lambda: step.do('one', charge))  # PLANTED"),
]  # fmt: skip

INNOCENT = [
    (
        "an async function that a step's function runs",
        "import anyio\nasync def ask():\n    pass",
        "step.do('ask', anyio.run, ask)",
    ),
    (
        "an option of a function that calls another",
        "def call(fn, **options):\n    pass\ndef ask():\n    pass",
        "step.do('ask', call, ask, timeout=5)\nstep.do(call, ask, timeout=5)",
    ),
    ("a function with a parameter like an option", "def ask(timeout):\n    pass", "step.do('ask', ask, timeout=5)"),
    ("a function with any options", "def ask(**options):\n    pass", "step.do('ask', ask, retries=5)"),
    ("a function of another module", "from shop import ask", "step.do('ask', ask, retries=5)"),
    ("a clock in a step", "import time", "step.do('read clock', time.time)"),
    (
        "a clock in a function that is a step",
        "import time",
        "def read() -> float:\n    return time.time()\nstep.do(read)",
    ),
    ("the step's own clock and chance", "", "at, dice, key = step.now(), step.random(), step.uuid()"),
    ("a time from data", "from datetime import datetime", "at = datetime.fromisoformat(event.payload)"),
    ("a local time of a known time", "import time", "year = time.gmtime(event.payload).tm_year"),
    ("a seeded generator", "import random", "dice = random.Random(event.instance_id).random()"),
    ("a UUID derived from a name", "import uuid", "key = uuid.uuid5(uuid.NAMESPACE_URL, event.payload)"),
    ("a local name like a module's", "", "time = event.payload\ntime.time()"),
    ("a builtin's name for a value", "", "id = event.payload\nstep.do(f'charge {id}', charge)"),
    ("a parameter called open", "", "def get(open):\n    return open(1)\nget(str)"),
    ("a path that is only put together", "from pathlib import Path", "name = (Path('in') / event.payload).name"),
    ("a constant", "PRICES = {'a': 1}", "price = PRICES[event.payload]"),
    ("a change of a local list", "", "sent = []\nfor n in event.payload:\n    sent.append(step.do(f'c {n}', charge))"),
    ("a set put into order", "", "for name in sorted({'ada', 'bob'}):\n    step.do(f'charge {name}', charge)"),
    ("a set that is only asked", "", "seen = set(event.payload)\nif 'ada' in seen:\n    step.do(charge)"),
    ("a name with the loop's key", "", "for name in event.payload:\n    step.do(f'charge {name}', charge, name)"),
    ("a name repeated on purpose", "", "for n in event.payload:\n    step.do('say', StepConfig(repeat=True), str, n)"),
    ("branches that are gathered", "", "step.gather(*[step.submit(n, charge) for n in event.payload])"),
    ("a branch that is asked", "", "branch = step.submit('charge', charge)\nbranch.result()"),
    ("failures that are handled", "", "try:\n    step.do(charge)\nexcept Exception:\n    step.do('undo', charge)"),
    (
        "a cleanup",
        "from celery_durable.errors import Cancelled",
        "try:\n    step.do(charge)\nexcept Cancelled as why:\n    print(1)\n    raise why",
    ),
    ("a suspension that gets through", "", "try:\n    step.do(charge)\nexcept BaseException:\n    print(1)\n    raise"),
    (
        "a finally that ends its own loop",
        "",
        "try:\n    step.do(charge)\nfinally:\n    for n in [1]:\n        if n:\n            break",
    ),
    (
        "a finally that ends its async loop",
        "",
        "try:\n    step.do(charge)\nfinally:\n    async for n in []:\n        break",
    ),
    (
        "a finally with a function",
        "",
        "try:\n    step.do(charge)\nfinally:\n    async def one():\n        return 1\n    print(one)",
    ),
    ("a bare except around no step", "", "try:\n    n = int(event.payload)\nexcept:\n    n = 0"),
    ("a value published by a step", "", "step.do('all', lambda: step.publish('progress', 1))"),
]
"""Code that looks like a mistake and is none: what it is, lines above the workflow, and the workflow's body."""
