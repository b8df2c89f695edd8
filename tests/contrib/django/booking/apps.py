from django.apps import AppConfig


class BookingConfig(AppConfig):
    name = "tests.contrib.django.booking"
    label = "booking"
    default_auto_field = "django.db.models.BigAutoField"


class UnattachedDurableConfig(AppConfig):
    """The integration without its ``ready``: each test attaches a Durable of its own."""

    name = "celery_durable.contrib.django"
    label = "celery_durable"
    default_auto_field = "django.db.models.BigAutoField"
