"""Workflows in a Django project: ``INSTALLED_APPS += ["celery_durable.contrib.django"]``.

The workflows are in a database of the project. What the application does inside ``transaction.atomic()``, such as
``order.create(params)``, commits or rolls back with it. A step's function that takes `StepTx` runs inside ``atomic()``,
which commits together with the step's record.
"""
