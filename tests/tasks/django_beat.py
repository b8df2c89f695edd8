"""Two beats with the DatabaseScheduler of django-celery-beat: `python -m tests.tasks.django_beat FOLDER`.

Prints the messages that they send, one a line. A process of its own, because Django's settings are global.
"""

from __future__ import annotations

import json
import queue
import sys
import warnings

import django
from celery import Celery, signals
from celery.beat import Service
from django.conf import settings

from celery_durable import Durable, Step, WorkflowEvent

warnings.simplefilter("ignore", DeprecationWarning)  # of django-celery-beat, about Django
folder = sys.argv[1]
settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/django.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask  # noqa: E402
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

call_command("migrate", verbosity=0)
# Every hour of a day in January: the scheduler leaves out what is due only in other hours than this one.
january = CrontabSchedule.objects.create(
    minute="30", hour="*", day_of_month="1", month_of_year="1", timezone="America/New_York"
)
daily = IntervalSchedule.objects.create(every=365, period="days")
entry = {"task": "celery_durable.start", "args": json.dumps([1])}
dated = json.dumps({"workflow": "report", "id": "r-{scheduled:%H%M}-{scheduled:%Y-%m-%d}"})
PeriodicTask.objects.create(name="dated", crontab=january, kwargs=dated, **entry)
PeriodicTask.objects.create(name="other", interval=daily, kwargs=json.dumps({"workflow": "report"}), **entry)

app = Celery("beats", broker="memory://")
app.conf.update(durable_database_url=f"sqlite:///{folder}/durable.sqlite3", durable_dispatcher="none")
durable = Durable(app)


@durable.workflow
def report(event: WorkflowEvent[int], step: Step) -> None: ...


for _ in range(2):
    service = Service(app, scheduler_cls=DatabaseScheduler)
    signals.beat_init.send(sender=service)
    for name in ("dated", "other"):
        service.scheduler.apply_entry(service.scheduler.schedule[name])

with app.connection_for_read() as connection:
    simple = connection.SimpleQueue(app.amqp.queues["durable"])
    try:
        while True:
            print(json.dumps(json.loads(simple.get(block=False).body)[:2]))
    except queue.Empty:
        simple.close()
