"""Workflows in a Django project: ``INSTALLED_APPS += ["celery_durable.contrib.django"]``.

What the application does inside ``transaction.atomic()``, such as ``order.create(params)``, is a part of it. A step's
function that takes `StepTx` runs inside ``atomic()``, which commits together with the step's record.
"""
